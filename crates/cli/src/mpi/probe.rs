//! A probe that checks, in a child process, whether a libfabric loads Memferry's provider. The
//! child isolates `doctor` from a library that crashes while it is loaded, and one process cannot
//! load two versions of the same library.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::time::Duration;

use anyhow::{Context, bail};
use memferry_bench::host::mpi::variables::PROVIDER_PATH;
use memferry_bench::host::process;

use crate::show;

/// The file name of the system's libfabric.
pub(crate) const LIBFABRIC: &str = "libfabric.so.1";
/// The prefix of the child's result lines, which separates them from the output of libfabric.
const PROBE_PREFIX: &str = "memferry-probe: ";
const PROVIDER_PREFIX: &str = "answers ";
const VERSION_PREFIX: &str = "version ";
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProbeResult {
    /// The version of the library; `None` if it was not loaded.
    pub(crate) libfabric: Option<String>,
    /// The fabric and the domain that the provider offers, or the reason why it offers none.
    pub(crate) provider: Result<String, String>,
}

/// Probes whether a libfabric loads the provider and whether the provider offers a fabric.
pub(crate) fn query(library: &Path, provider: &Path) -> ProbeResult {
    let quiet = ProbeResult::parse(run_child(library, provider, false));
    if quiet.provider.is_ok() {
        return quiet;
    }
    // The second run enables libfabric's debug log, to find the reason.
    let loud = run_child(library, provider, true);
    match loud.as_deref().ok().and_then(reason_in).filter(|_| quiet.libfabric.is_some()) {
        Some(reason) => ProbeResult { provider: Err(reason), ..quiet },
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
    process::output(command, PROBE_TIMEOUT)
}

impl ProbeResult {
    fn parse(said: Result<String, String>) -> Self {
        let text = match said {
            Ok(text) => text,
            Err(error) => return Self { libfabric: None, provider: Err(error) },
        };
        let mut answer = Self { libfabric: None, provider: Err("it said nothing".into()) };
        for line in text.lines().filter_map(|line| line.strip_prefix(PROBE_PREFIX)) {
            if let Some(version) = line.strip_prefix(VERSION_PREFIX) {
                answer.libfabric = Some(version.to_owned());
            } else if let Some(offer) = line.strip_prefix(PROVIDER_PREFIX) {
                answer.provider = Ok(offer.to_owned());
            } else {
                answer.provider = Err(line.to_owned());
            }
        }
        answer
    }
}

/// The line of libfabric's log that reports what is wrong with the provider.
fn reason_in(log: &str) -> Option<String> {
    const ERROR_WORDS: [&str; 7] =
        ["dlopen", "dlsym", "fail", "error", "cannot", "disabled", "returned -"];
    let telling = |line: &&str| {
        line.contains("memferry")
            && !line.starts_with(PROBE_PREFIX)
            && ERROR_WORDS.iter().any(|word| line.to_lowercase().contains(word))
    };
    let line = log.lines().rev().find(telling)?;
    // The prefix up to `> ` holds the process, the time, the component and the source location.
    Some(line.split_once("> ").map_or(line, |(_, text)| text).trim().to_owned())
}

/// The child process: loads a libfabric, queries it for the provider, and prints the result.
pub(crate) fn run(library: &Path, provider: &Path) -> anyhow::Result<()> {
    let mut lines = Vec::new();
    if let Err(error) = query_libfabric(library, &mut lines) {
        lines.push(format!("{error:#}"));
        // Some versions of libfabric do not report why a provider was not loaded.
        let loaded = lines[0].starts_with(VERSION_PREFIX);
        let tried = loaded.then(|| load(provider).and_then(|it| symbol(it, c"fi_prov_ini")));
        lines.extend(tried.and_then(Result::err).map(|error| format!("{error:#}")));
    }
    let lines = lines.into_iter().map(|line| format!("{PROBE_PREFIX}{line}\n"));
    Ok(show::print(&lines.collect::<String>())?)
}

/// The fields of `struct fi_info` that are the same in all versions of libfabric.
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

/// The first fields of `struct fi_domain_attr`.
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

fn query_libfabric(library: &Path, lines: &mut Vec<String>) -> anyhow::Result<()> {
    let handle = load(library)?;
    // SAFETY: the functions have had these signatures since the first version of the library.
    unsafe {
        let fi_version: FiVersion = std::mem::transmute(symbol(handle, c"fi_version")?);
        let fi_dupinfo: FiDupinfo = std::mem::transmute(symbol(handle, c"fi_dupinfo")?);
        let fi_freeinfo: FiFreeinfo = std::mem::transmute(symbol(handle, c"fi_freeinfo")?);
        let fi_strerror: FiStrerror = std::mem::transmute(symbol(handle, c"fi_strerror")?);
        let fi_getinfo: FiGetinfo = std::mem::transmute(symbol(handle, c"fi_getinfo")?);
        let version = fi_version();
        lines.push(format!("{VERSION_PREFIX}{}.{}", version >> 16, version & 0xFFFF));
        let hints = fi_dupinfo(ptr::null());
        if hints.is_null() || (*hints).fabric_attr.is_null() {
            bail!("libfabric has no memory");
        }
        // `fi_freeinfo` frees the name together with the hints.
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
        lines.push(format!("{PROVIDER_PREFIX}with fabric {fabric}, domain {domain}"));
        fi_freeinfo(found);
    }
    Ok(())
}

fn load(library: &Path) -> anyhow::Result<*mut c_void> {
    let name = CString::new(library.as_os_str().as_bytes())?;
    // SAFETY: loading a library runs its initialisers; this process exists only to load it.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        bail!("{} cannot be loaded: {}", library.display(), last_error());
    }
    Ok(handle)
}

fn symbol(handle: *mut c_void, name: &CStr) -> anyhow::Result<*mut c_void> {
    // SAFETY: the handle belongs to a library that stays loaded.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found).with_context(|| {
        format!("the library has no {}: it is another one", name.to_string_lossy())
    })
}

fn last_error() -> String {
    // SAFETY: the text stays valid until the next call of a `dl*` function in this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "for no reason".into();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// The libfabric that the MPI of a launcher loads.
pub(crate) fn libfabric_of(launcher: &memferry_bench::host::mpi::Launcher) -> PathBuf {
    launcher.bundled_libfabric().unwrap_or_else(|| LIBFABRIC.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_picked_out_of_what_libraries_print() {
        let text = "noise\nmemferry-probe: version 1.17\nmemferry-probe: answers with fabric f\n";
        let answer = ProbeResult::parse(Ok(text.into()));
        assert_eq!(answer.libfabric.as_deref(), Some("1.17"));
        assert_eq!(answer.provider.as_deref(), Ok("with fabric f"));
        let none = ProbeResult::parse(Ok("memferry-probe: x cannot be loaded".into()));
        assert_eq!(none.provider.unwrap_err(), "x cannot be loaded");
        assert_eq!(none.libfabric, None);
        assert_eq!(ProbeResult::parse(Err("crashed".into())).provider.unwrap_err(), "crashed");
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
        let error = query_libfabric(Path::new("/no/such/libfabric.so.1"), &mut lines).unwrap_err();
        assert!(error.to_string().contains("/no/such/libfabric.so.1 cannot be loaded"), "{error}");
    }
}
