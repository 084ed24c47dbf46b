//! The addresses of this process's endpoints. Programs open several endpoints from one info, and ask in
//! several processes of a host for the same service: one endpoint can have the address that was asked
//! for, the others get addresses of their own.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex};

use crate::abi::{FI_EADDRINUSE, FI_EADDRNOTAVAIL};
use crate::address::{Address, HostId, LocalId, SOCKET_BYTES};
use crate::guard::{Code, Result};

static TAKEN: LazyLock<Mutex<HashSet<LocalId>>> = LazyLock::new(Mutex::default);

/// An address that no other endpoint of this process has.
#[derive(Debug)]
pub(super) struct OwnAddress {
    address: Address,
    /// No other will do: the program has given it, and may have told others.
    is_fixed: bool,
}

impl OwnAddress {
    /// The one that is wanted if it is free, else a new one.
    pub(super) fn take(wanted: Option<Address>) -> Result<Self> {
        match wanted.map(Self::exactly) {
            Some(Err(Code(FI_EADDRINUSE))) | None => Self::new(),
            Some(outcome) => outcome.map(Self::replaceable),
        }
    }

    /// The one that is wanted.
    pub(super) fn exactly(wanted: Address) -> Result<Self> {
        if wanted.host != HostId::ours() {
            return Err(Code(FI_EADDRNOTAVAIL));
        }
        let is_free = TAKEN.lock().unwrap().insert(wanted.id);
        if is_free {
            Ok(Self { address: wanted, is_fixed: true })
        } else {
            Err(Code(FI_EADDRINUSE))
        }
    }

    /// One that nobody else has.
    pub(super) fn new() -> Result<Self> {
        Self::exactly(Address::here(LocalId::random()))
    }

    pub(super) fn get(&self) -> Address {
        self.address
    }

    /// Other hosts reach the endpoint at this socket.
    pub(super) fn set_socket(&mut self, socket: [u8; SOCKET_BYTES]) {
        self.address.socket = socket;
    }

    fn replaceable(mut self) -> Self {
        self.is_fixed = false;
        self
    }

    pub(super) fn is_fixed(&self) -> bool {
        self.is_fixed
    }
}

impl Drop for OwnAddress {
    fn drop(&mut self) {
        if let Ok(mut taken) = TAKEN.lock() {
            taken.remove(&self.address.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_had_once_at_a_time() {
        let wanted = Address::here(LocalId::random());
        let first = OwnAddress::take(Some(wanted)).unwrap();
        let second = OwnAddress::take(Some(wanted)).unwrap();
        assert_eq!(first.get(), wanted);
        assert_ne!(second.get(), wanted);
        assert!(OwnAddress::exactly(wanted).is_err());
        drop(first);
        assert!(OwnAddress::exactly(wanted).is_ok());
    }
}
