//! Loading modules into the kernel.

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;

use rustix::io::Errno;
use rustix::system::finit_module;

/// The flag `MODULE_INIT_COMPRESSED_FILE`: the kernel decompresses the module.
const COMPRESSED_FILE: i32 = 4;

pub(super) fn load(path: &Path) -> Result<(), String> {
    let flags = if path.extension() == Some(OsStr::new("ko")) { 0 } else { COMPRESSED_FILE };
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    match finit_module(&file, c"", flags) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) if flags == COMPRESSED_FILE => Err(format!(
            "the kernel cannot load the compressed module {} ({error}): unpack it on the host",
            path.display()
        )),
        Err(error) => Err(format!("the kernel cannot load {}: {error}", path.display())),
    }
}
