//! Addresses of endpoints: the result of `fi_getname` and the argument of `fi_av_insert`.
//!
//! All have the same length, because programs exchange them without a length: an identifier, the
//! identity of the host, and the socket address at which other hosts reach the endpoint.

mod host;
mod vector;

use std::fmt::Write;

pub(crate) use host::HostId;
pub(crate) use vector::{AddressLocation, AddressVector, copy_out, open};

/// The length of an address in bytes: the maximum that Open MPI stores.
pub(crate) const ADDRESS_BYTES: usize = 64;
/// The length of a socket address in bytes, which is at most that of IPv6.
pub(crate) const SOCKET_BYTES: usize = 28;
/// The first bytes of every address. The digit is the version.
const MAGIC: [u8; 4] = *b"mfy1";

/// The identifier of an endpoint within its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LocalId(pub(crate) [u8; 16]);

impl LocalId {
    /// Creates a random identifier.
    pub(crate) fn random() -> Self {
        let mut bytes = [0; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::rand::getrandom(
                &mut bytes[filled..],
                rustix::rand::GetRandomFlags::empty(),
            ) {
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                // Without random numbers: an identifier that no other endpoint of this host has at
                // this time.
                Err(_) => return Self::of_now(),
            }
        }
        Self(bytes)
    }

    fn of_now() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_nanos());
        Self::derived(&format!("{} {now} {:?}", std::process::id(), std::thread::current().id()))
    }

    /// The identifier of a service, which both sides of a connection know by name.
    pub(crate) fn of_service(service: &str) -> Self {
        Self::derived(&format!("service {service}"))
    }

    fn derived(text: &str) -> Self {
        Self(host::digest(text.as_bytes()))
    }

    /// The name on which the endpoint listens.
    pub(crate) fn listening_name(self) -> String {
        let mut name = String::from("fi:");
        self.0.iter().for_each(|byte| write!(name, "{byte:02x}").expect("strings can be written"));
        name
    }

    /// Parses the identifier from a listening name.
    pub(crate) fn from_listening_name(name: &str) -> Option<Self> {
        let digits = name.strip_prefix("fi:").filter(|digits| digits.len() == 32)?;
        u128::from_str_radix(digits, 16).ok().map(|number| Self(number.to_be_bytes()))
    }
}

/// The address of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) id: LocalId,
    pub(crate) host: HostId,
    /// The socket address for peers on other hosts; zero if there is none.
    pub(crate) socket: [u8; SOCKET_BYTES],
}

impl Address {
    /// The address of an endpoint on this host.
    pub(crate) fn here(id: LocalId) -> Self {
        Self { id, host: HostId::ours(), socket: [0; SOCKET_BYTES] }
    }

    pub(crate) fn to_bytes(self) -> [u8; ADDRESS_BYTES] {
        let mut bytes = [0; ADDRESS_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..20].copy_from_slice(&self.id.0);
        bytes[20..36].copy_from_slice(&self.host.0);
        bytes[36..].copy_from_slice(&self.socket);
        bytes
    }

    /// Decodes an address.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ADDRESS_BYTES] = bytes.get(..ADDRESS_BYTES)?.try_into().ok()?;
        if bytes[..4] != MAGIC {
            return None;
        }
        Some(Self {
            id: LocalId(bytes[4..20].try_into().ok()?),
            host: HostId(bytes[20..36].try_into().ok()?),
            socket: bytes[36..].try_into().ok()?,
        })
    }

    /// The text for display.
    pub(crate) fn text(&self) -> String {
        let location = if self.host == HostId::ours() { "here" } else { "elsewhere" };
        format!("fi_memferry://{location}/{}", &self.id.listening_name()[3..])
    }
}

/// Returns whether a host name or address belongs to this host.
pub(crate) fn is_this_host(node: &str) -> bool {
    // Only an address of this host can be bound.
    node == "localhost" || std::net::UdpSocket::bind((node, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_its_bytes() {
        let address = Address { socket: [7; SOCKET_BYTES], ..Address::here(LocalId::random()) };
        assert_eq!(Address::from_bytes(&address.to_bytes()), Some(address));
        assert_eq!(Address::from_bytes(&[0; ADDRESS_BYTES]), None);
        assert_eq!(Address::from_bytes(&address.to_bytes()[..63]), None);
    }

    #[test]
    fn a_listening_name_tells_the_identifier() {
        let id = LocalId::random();
        assert_ne!(id, LocalId::random());
        assert_eq!(LocalId::from_listening_name(&id.listening_name()), Some(id));
        assert_eq!(LocalId::from_listening_name("fi:12"), None);
        assert_eq!(LocalId::from_listening_name("something else"), None);
    }

    #[test]
    fn both_sides_find_a_service_by_its_name() {
        assert_eq!(LocalId::of_service("9228"), LocalId::of_service("9228"));
        assert_ne!(LocalId::of_service("9228"), LocalId::of_service("9229"));
    }

    #[test]
    fn this_host_is_known_by_its_addresses() {
        assert!(is_this_host("127.0.0.1") && is_this_host("localhost"));
        assert!(!is_this_host("192.0.2.1"));
    }
}
