//! Asks a libfabric for Memferry's provider, in a child process: a library that crashes while it is
//! loaded must not take `doctor` along, and two versions of one library do not fit into a process.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::time::Duration;

use anyhow::{Context, bail};

use super::variables::PROVIDER_PATH;
use crate::{process, show};

/// What the machine's own libfabric is called.
pub(crate) const LIBFABRIC: &str = "libfabric.so.1";
/// What the child's answers begin with, among whatever libfabric prints.
const MARK: &str = "memferry-probe: ";
const ANSWERS: &str = "answers ";
const VERSION: &str = "version ";
const PATIENCE: Duration = Duration::from_secs(20);

/// What a libfabric said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The version of the library; nothing if it could not be loaded.
    pub(crate) libfabric: Option<String>,
    /// The fabric and the domain that the provider offers, or why it offers none.
    pub(crate) provider: Result<String, String>,
}

/// Asks a libfabric whether it loads a provider, and whether that answers.
pub(crate) fn ask(library: &Path, provider: &Path) -> Answer {
    let quiet = Answer::read(run_child(library, provider, false));
    if quiet.provider.is_ok() {
        return quiet;
    }
    // Once more with everything that libfabric has to say, to learn the reason.
    let loud = run_child(library, provider, true);
    match loud.as_deref().ok().and_then(reason_in).filter(|_| quiet.libfabric.is_some()) {
        Some(reason) => Answer { provider: Err(reason), ..quiet },
        None => quiet,
    }
}

fn run_child(library: &Path, provider: &Path, loud: bool) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let folder = provider.parent().unwrap_or(Path::new("/"));
    let mut command = Command::new(program);
    command.arg("fabric-probe").args([library, provider]).env(PROVIDER_PATH, folder);
    command.env_remove("FI_PROVIDER").env_remove("FI_LOG_LEVEL");
    if loud {
        command.env("FI_LOG_LEVEL", "debug");
    }
    process::output(command, PATIENCE)
}

impl Answer {
    fn read(said: Result<String, String>) -> Self {
        let text = match said {
            Ok(text) => text,
            Err(error) => return Self { libfabric: None, provider: Err(error) },
        };
        let mut answer = Self { libfabric: None, provider: Err("it said nothing".into()) };
        for line in text.lines().filter_map(|line| line.strip_prefix(MARK)) {
            if let Some(version) = line.strip_prefix(VERSION) {
                answer.libfabric = Some(version.to_owned());
            } else if let Some(offer) = line.strip_prefix(ANSWERS) {
                answer.provider = Ok(offer.to_owned());
            } else {
                answer.provider = Err(line.to_owned());
            }
        }
        answer
    }
}

/// The line of libfabric's log that says what is wrong with the provider.
fn reason_in(log: &str) -> Option<String> {
    const TROUBLE: [&str; 7] =
        ["dlopen", "dlsym", "fail", "error", "cannot", "disabled", "returned -"];
    let telling = |line: &&str| {
        line.contains("memferry")
            && !line.starts_with(MARK)
            && TROUBLE.iter().any(|word| line.to_lowercase().contains(word))
    };
    let line = log.lines().rev().find(telling)?;
    // Before the sign stand process, time, part and place.
    Some(line.split_once("> ").map_or(line, |(_, text)| text).trim().to_owned())
}

/// The child: loads a libfabric, asks it, and says what it answered.
pub(crate) fn run(library: &Path, provider: &Path) -> anyhow::Result<()> {
    let mut lines = Vec::new();
    if let Err(error) = question(library, &mut lines) {
        lines.push(format!("{error:#}"));
        // Some versions of libfabric never say why a provider could not be loaded.
        let loaded = lines[0].starts_with(VERSION);
        let tried = loaded.then(|| load(provider).and_then(|it| symbol(it, c"fi_prov_ini")));
        lines.extend(tried.and_then(Result::err).map(|error| format!("{error:#}")));
    }
    let lines = lines.into_iter().map(|line| format!("{MARK}{line}\n"));
    Ok(show::print(&lines.collect::<String>())?)
}

/// `struct fi_info`, which is the same in all versions as far as it goes here.
#[repr(C)]
struct FiInfo {
    next: *mut FiInfo,
    caps: u64,
    mode: u64,
    addr_format: u32,
    src_addrlen: usize,
    dest_addrlen: usize,
    src_addr: *mut c_void,
    dest_addr: *mut c_void,
    handle: *mut c_void,
    tx_attr: *mut c_void,
    rx_attr: *mut c_void,
    ep_attr: *mut c_void,
    domain_attr: *mut FiDomainAttr,
    fabric_attr: *mut FiFabricAttr,
}

/// The beginning of `struct fi_domain_attr`.
#[repr(C)]
struct FiDomainAttr {
    domain: *mut c_void,
    name: *mut c_char,
}

/// `struct fi_fabric_attr`.
#[repr(C)]
struct FiFabricAttr {
    fabric: *mut c_void,
    name: *mut c_char,
    prov_name: *mut c_char,
    prov_version: u32,
    api_version: u32,
}

type FiVersion = unsafe extern "C" fn() -> u32;
type FiDupinfo = unsafe extern "C" fn(*const FiInfo) -> *mut FiInfo;
type FiFreeinfo = unsafe extern "C" fn(*mut FiInfo);
type FiStrerror = unsafe extern "C" fn(c_int) -> *const c_char;
type FiGetinfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const FiInfo,
    *mut *mut FiInfo,
) -> c_int;

fn question(library: &Path, lines: &mut Vec<String>) -> anyhow::Result<()> {
    let handle = load(library)?;
    // SAFETY: the functions have had these signatures since the first version of the library.
    unsafe {
        let fi_version: FiVersion = std::mem::transmute(symbol(handle, c"fi_version")?);
        let fi_dupinfo: FiDupinfo = std::mem::transmute(symbol(handle, c"fi_dupinfo")?);
        let fi_freeinfo: FiFreeinfo = std::mem::transmute(symbol(handle, c"fi_freeinfo")?);
        let fi_strerror: FiStrerror = std::mem::transmute(symbol(handle, c"fi_strerror")?);
        let fi_getinfo: FiGetinfo = std::mem::transmute(symbol(handle, c"fi_getinfo")?);
        let version = fi_version();
        lines.push(format!("{VERSION}{}.{}", version >> 16, version & 0xFFFF));
        let hints = fi_dupinfo(ptr::null());
        if hints.is_null() || (*hints).fabric_attr.is_null() {
            bail!("libfabric has no memory");
        }
        // libfabric frees it with the hints.
        (*(*hints).fabric_attr).prov_name = libc::strdup(c"memferry".as_ptr());
        let mut found = ptr::null_mut();
        let code = fi_getinfo(version, ptr::null(), ptr::null(), 0, hints, &mut found);
        fi_freeinfo(hints);
        if code != 0 || found.is_null() {
            let error = CStr::from_ptr(fi_strerror(-code)).to_string_lossy().into_owned();
            bail!("fi_getinfo finds no provider memferry: {error}");
        }
        let text = |text: *const c_char| match text.is_null() {
            true => "unnamed".to_owned(),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        };
        let fabric = text((*(*found).fabric_attr).name);
        let domain = text((*(*found).domain_attr).name);
        lines.push(format!("{ANSWERS}with fabric {fabric}, domain {domain}"));
        fi_freeinfo(found);
    }
    Ok(())
}

fn load(library: &Path) -> anyhow::Result<*mut c_void> {
    let name = CString::new(library.as_os_str().as_bytes())?;
    // SAFETY: loading a library runs its initialisers; this process exists for nothing else.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        bail!("{} cannot be loaded: {}", library.display(), last_error());
    }
    Ok(handle)
}

fn symbol(handle: *mut c_void, name: &CStr) -> anyhow::Result<*mut c_void> {
    // SAFETY: the handle is of a library that stays loaded.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found).with_context(|| {
        format!("the library has no {}: it is another one", name.to_string_lossy())
    })
}

fn last_error() -> String {
    // SAFETY: the text is valid until the next call of this kind in this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "for no reason".into();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// The library that a launcher's MPI loads.
pub(crate) fn libfabric_of(launcher: &super::Launcher) -> PathBuf {
    launcher.bundled_libfabric().unwrap_or_else(|| LIBFABRIC.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_picked_out_of_what_libraries_print() {
        let text = "noise\nmemferry-probe: version 1.17\nmemferry-probe: answers with fabric f\n";
        let answer = Answer::read(Ok(text.into()));
        assert_eq!(answer.libfabric.as_deref(), Some("1.17"));
        assert_eq!(answer.provider.as_deref(), Ok("with fabric f"));
        let none = Answer::read(Ok("memferry-probe: x cannot be loaded".into()));
        assert_eq!(none.provider.unwrap_err(), "x cannot be loaded");
        assert_eq!(none.libfabric, None);
        assert_eq!(Answer::read(Err("crashed".into())).provider.unwrap_err(), "crashed");
    }

    #[test]
    fn the_reason_is_found_in_a_log() {
        let log = "libfabric:1:2::core:core:ofi_reg_dl_prov():660<debug> opening provider lib \
                   /x/libmemferry_fi.so\n\
                   libfabric:1:2::core:core:ofi_reg_dl_prov():665<debug> dlopen(/x/libmemferry_fi.so): \
                   undefined symbol: nothing\n\
                   memferry-probe: fi_getinfo finds no provider memferry: No data available\n";
        let reason = reason_in(log).unwrap();
        assert_eq!(reason, "dlopen(/x/libmemferry_fi.so): undefined symbol: nothing");
        assert_eq!(reason_in("<info> Requesting provider memferry, skipping tcp"), None);
    }

    #[test]
    fn a_library_that_is_not_there_is_said_so() {
        let mut lines = Vec::new();
        let error = question(Path::new("/no/such/libfabric.so.1"), &mut lines).unwrap_err();
        assert!(error.to_string().contains("/no/such/libfabric.so.1 cannot be loaded"), "{error}");
    }
}
