//! Addresses of endpoints: what `fi_getname` gives and `fi_av_insert` takes.
//!
//! All have the same length, which programs exchange without asking: an identifier, the identity of
//! the host, and room for the address of a socket by which other hosts reach the endpoint.

mod host;
mod vector;

use std::fmt::Write;

pub(crate) use host::HostId;
pub(crate) use vector::{AddressVector, Place, copy_out, open};

/// The bytes of an address: as many as the longest name that Open MPI keeps.
pub(crate) const ADDRESS_BYTES: usize = 64;
/// The bytes for a socket's address, which is that of IPv6 at most.
pub(crate) const SOCKET_BYTES: usize = 28;
/// What every address begins with. The digit is the version.
const MAGIC: [u8; 4] = *b"mfy1";

/// What tells endpoints of one host apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LocalId(pub(crate) [u8; 16]);

impl LocalId {
    /// One that nobody else has.
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
                // Without random numbers: what no other endpoint of this host has at this time.
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

    /// That of a service, which both sides of a connection call by the same name.
    pub(crate) fn of_service(service: &str) -> Self {
        Self::derived(&format!("service {service}"))
    }

    fn derived(text: &str) -> Self {
        Self(host::digest(text.as_bytes()))
    }

    /// The name under which the endpoint listens.
    pub(crate) fn listening_name(self) -> String {
        let mut name = String::from("fi:");
        self.0.iter().for_each(|byte| write!(name, "{byte:02x}").expect("strings can be written"));
        name
    }

    /// The identifier that such a name was made from.
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
    /// The socket's address for peers on other hosts; zero if there is none.
    pub(crate) socket: [u8; SOCKET_BYTES],
}

impl Address {
    /// That of an endpoint of this host.
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

    /// The address that these bytes are, if they are one.
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

    /// For people.
    pub(crate) fn text(&self) -> String {
        let place = if self.host == HostId::ours() { "here" } else { "elsewhere" };
        format!("fi_memferry://{place}/{}", &self.id.listening_name()[3..])
    }
}

/// Whether a host's name or address is one of this host.
pub(crate) fn is_this_host(node: &str) -> bool {
    // Only an address of this host can be listened on.
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
