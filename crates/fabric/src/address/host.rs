//! The identity of this host: equal for two processes if they can connect and access each other's
//! memory, which needs the same kernel and the same namespaces.

use std::os::unix::fs::MetadataExt;

use memferry_sys::fork::ForkSafe;
use memferry_sys::settings;

/// The identity of a host; host names may be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct HostId(pub(crate) [u8; 16]);

impl HostId {
    /// The identity of this process's host.
    pub(crate) fn ours() -> Self {
        static OURS: ForkSafe<HostId> = ForkSafe::new();
        *OURS.get_or_init(|| {
            // For containers that look like one host and are not, and for tests.
            let named =
                settings::value_of("MEMFERRY_HOST_ID").and_then(|named| named.into_string().ok());
            if let Some(named) = named {
                return Self(digest(format!("named {named}").as_bytes()));
            }
            let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
            let boot = boot.unwrap_or_else(|_| unreadable_boot());
            // Listening names belong to a network namespace, pids to a pid namespace.
            let [net, pid] = ["net", "pid"].map(|kind| {
                std::fs::metadata(format!("/proc/self/ns/{kind}")).map_or(0, |file| file.ino())
            });
            Self(digest(format!("{} {net} {pid}", boot.trim()).as_bytes()))
        })
    }
}

/// Without a readable boot id, the host name is the best substitute.
fn unreadable_boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default()
}

/// A 16-byte hash (FNV-1a). Nothing here is secret.
pub(super) fn digest(bytes: &[u8]) -> [u8; 16] {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let step = |hash: u128, byte: &u8| (hash ^ u128::from(*byte)).wrapping_mul(PRIME);
    bytes.iter().fold(OFFSET, step).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_stays_the_same() {
        assert_eq!(HostId::ours(), HostId::ours());
        assert_ne!(HostId::ours(), HostId([0; 16]));
    }

    #[test]
    fn digests_differ_with_every_byte() {
        assert_ne!(digest(b"1 2"), digest(b"12 "));
        assert_ne!(digest(b""), digest(b"\0"));
    }
}
