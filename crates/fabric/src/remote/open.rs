//! The choice of the inner provider and interface from libfabric's list.

use std::ffi::{CStr, CString, c_int};
use std::net::IpAddr;
use std::ptr;

use memferry_sys::settings::{self, switch};

use super::library::Library;
use crate::abi::*;
use crate::warn_once::warn_once;

/// The requested version: that of the structures in `abi`.
const VERSION: u32 = (1 << 16) | 17;
/// Includes providers that `FI_PROVIDER` hides: the variable names the provider of the program,
/// which is this one. The flag is private to libfabric's core and its providers.
const ALL_PROVIDERS: u64 = 1 << 60;
const AF_INET: c_int = libc::AF_INET;
const AF_INET6: c_int = libc::AF_INET6;

/// The reason why other hosts cannot be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unavailable(pub(crate) String);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot reach other hosts: {}", self.0)
    }
}

/// The error of a failed call.
pub(super) fn failed(what: &str, code: isize) -> Unavailable {
    let error = std::io::Error::from_raw_os_error(-code as c_int);
    Unavailable(format!("{what}: {error}"))
}

/// The configuration of peers on other hosts.
#[derive(Debug, Clone, Default)]
pub(crate) struct RemoteConfig {
    /// No peers on other hosts.
    pub(crate) is_off: bool,
    /// The interface, by name or address.
    pub(crate) interface: Option<String>,
}

impl RemoteConfig {
    /// Reads `MEMFERRY_REMOTE` and `MEMFERRY_FABRIC_INTERFACE`. libfabric itself reads
    /// `FI_TCP_IFACE`.
    pub(crate) fn from_environment() -> Self {
        let is_off = match settings::read_variable("MEMFERRY_REMOTE", switch::parse) {
            Ok(switch) => switch == Some(false),
            Err(value) => {
                let expected = switch::EXPECTED;
                warn_once(format_args!(
                    "MEMFERRY_REMOTE = {value:?} is not valid: expected {expected}"
                ));
                false
            }
        };
        let interface = settings::value_of("MEMFERRY_FABRIC_INTERFACE");
        Self { is_off, interface: interface.and_then(|name| name.into_string().ok()) }
    }
}

/// An info that is freed with its owner.
#[derive(Debug)]
pub(super) struct OwnedInfo {
    library: &'static Library,
    pub(super) info: *mut Info,
}

impl Drop for OwnedInfo {
    fn drop(&mut self) {
        // SAFETY: it came from `dupinfo`, and no other code frees it.
        unsafe { (self.library.freeinfo)(self.info) };
    }
}

impl OwnedInfo {
    /// Queries libfabric, and chooses an info.
    pub(super) fn query(
        library: &'static Library,
        config: &RemoteConfig,
    ) -> Result<Self, Unavailable> {
        let hints = hints(library)?;
        let mut list = ptr::null_mut();
        let mut code = -FI_ENODATA;
        for flags in [0, ALL_PROVIDERS] {
            // SAFETY: hints of this library, and space for a pointer.
            code = unsafe {
                (library.getinfo)(VERSION, ptr::null(), ptr::null(), flags, hints.info, &mut list)
            };
            if code == 0 && !list.is_null() {
                let all = Self { library, info: list };
                return all.best(config.interface.as_deref());
            }
        }
        Err(failed("libfabric has no provider \"tcp\"", code as isize))
    }

    /// Copies the best info of the list.
    fn best(&self, interface: Option<&str>) -> Result<Self, Unavailable> {
        let mut best: Option<(u32, *mut Info)> = None;
        let mut at = self.info;
        while !at.is_null() {
            // SAFETY: infos of the list, which this object owns.
            let info = unsafe { &*at };
            // SAFETY: as above.
            if let Some(rank) = unsafe { rank(info, interface) }
                && best.is_none_or(|(other, _)| rank < other)
            {
                best = Some((rank, at));
            }
            at = info.next;
        }
        let Some((_, info)) = best else {
            let which = interface.map_or_else(String::new, |name| format!(" called {name}"));
            return Err(Unavailable(format!("there is no interface{which} with an address")));
        };
        // SAFETY: an info of the list; copies have no next one.
        let info = unsafe { (self.library.dupinfo)(info) };
        if info.is_null() {
            return Err(Unavailable("out of memory".into()));
        }
        Ok(Self { library: self.library, info })
    }
}

/// The rank of an info: lower is better, and the first of equals wins. `None` if the info cannot be
/// used.
///
/// # Safety
/// It must come from libfabric, with all its attributes.
unsafe fn rank(info: &Info, interface: Option<&str>) -> Option<u32> {
    // SAFETY: the caller guarantees it; names are C strings or null.
    let (address, provider, domain) = unsafe {
        let text = |name: *const std::ffi::c_char| {
            if name.is_null() { None } else { CStr::from_ptr(name).to_str().ok() }
        };
        let provider = text((*info.fabric_attr).prov_name)?;
        (ip_address(info)?, provider, text((*info.domain_attr).name).unwrap_or_default())
    };
    // Never a provider that might lead back to this one.
    let layers = match provider {
        "tcp" => 0,
        "tcp;ofi_rxm" => 1,
        _ => return None,
    };
    let is_wanted = match interface {
        Some(wanted) => wanted == domain || wanted.parse() == Ok(address),
        None => true,
    };
    // Link-local addresses have no meaning on other hosts.
    let is_of_link = matches!(address, IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80);
    if !is_wanted || is_of_link {
        return None;
    }
    // Loopback only if there is nothing else. All hosts must choose the same layers.
    let kind = u32::from(address.is_loopback()) * 2 + u32::from(address.is_ipv6());
    Some(layers * 8 + kind)
}

/// The address that an endpoint would have.
unsafe fn ip_address(info: &Info) -> Option<IpAddr> {
    if info.src_addr.is_null() || info.src_addrlen < size_of::<libc::sockaddr_in>() {
        return None;
    }
    // SAFETY: a socket address of at least this length.
    let family = unsafe { info.src_addr.cast::<libc::sockaddr>().read_unaligned() }.sa_family;
    match c_int::from(family) {
        AF_INET => {
            // SAFETY: as above.
            let address = unsafe { info.src_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::V4(u32::from_be(address.sin_addr.s_addr).into()))
        }
        AF_INET6 if info.src_addrlen >= size_of::<libc::sockaddr_in6>() => {
            // SAFETY: its length was just checked.
            let address = unsafe { info.src_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(IpAddr::V6(address.sin6_addr.s6_addr.into()))
        }
        _ => None,
    }
}

fn hints(library: &'static Library) -> Result<OwnedInfo, Unavailable> {
    // SAFETY: without an info to copy, the function creates an empty one.
    let info = unsafe { (library.dupinfo)(ptr::null()) };
    if info.is_null() {
        return Err(Unavailable("out of memory".into()));
    }
    let hints = OwnedInfo { library, info };
    let provider = CString::from(c"tcp");
    // SAFETY: the info and its attributes were just allocated; the name is freed with them.
    unsafe {
        let info = &mut *info;
        info.caps = FI_MSG | FI_TAGGED | FI_DIRECTED_RECV | FI_SOURCE;
        let (tx, rx) = (&mut *info.tx_attr, &mut *info.rx_attr);
        (tx.msg_order, rx.msg_order) = (FI_ORDER_SAS, FI_ORDER_SAS);
        (*info.ep_attr).r#type = FI_EP_RDM;
        let domain = &mut *info.domain_attr;
        domain.threading = FI_THREAD_DOMAIN;
        domain.control_progress = FI_PROGRESS_MANUAL;
        domain.data_progress = FI_PROGRESS_MANUAL;
        domain.resource_mgmt = FI_RM_ENABLED;
        domain.av_type = FI_AV_TABLE;
        domain.mr_mode = 0;
        (*info.fabric_attr).prov_name = libc::strdup(provider.as_ptr());
    }
    Ok(hints)
}
