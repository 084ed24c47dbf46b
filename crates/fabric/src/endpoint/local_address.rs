//! The addresses of this process's endpoints. Programs open several endpoints from one info, and
//! request the same service in several processes of a host: one endpoint gets the requested
//! address, the others get addresses of their own.

use std::collections::HashSet;
use std::sync::Mutex;

use memferry_sys::fork::PerProcess;

use crate::abi::{FI_EADDRINUSE, FI_EADDRNOTAVAIL};
use crate::address::{Address, HostId, LocalId, SOCKET_BYTES};
use crate::guard::{FiError, Result};

static RESERVED: PerProcess<Mutex<HashSet<LocalId>>> = PerProcess::new();

/// An address that no other endpoint of this process has.
#[derive(Debug)]
pub(super) struct ReservedAddress {
    address: Address,
    /// The program has set the address, and may have published it: no other can be used.
    is_fixed: bool,
}

impl ReservedAddress {
    /// Reserves the requested address if it is free, else a new one.
    pub(super) fn reserve(wanted: Option<Address>) -> Result<Self> {
        match wanted.map(Self::reserve_exact) {
            Some(Err(FiError(FI_EADDRINUSE))) | None => Self::new(),
            Some(outcome) => outcome.map(Self::replaceable),
        }
    }

    /// Reserves the requested address.
    pub(super) fn reserve_exact(wanted: Address) -> Result<Self> {
        if wanted.host != HostId::ours() {
            return Err(FiError(FI_EADDRNOTAVAIL));
        }
        let is_free = RESERVED.lock().insert(wanted.id);
        if is_free {
            Ok(Self { address: wanted, is_fixed: true })
        } else {
            Err(FiError(FI_EADDRINUSE))
        }
    }

    /// Reserves a new address.
    pub(super) fn new() -> Result<Self> {
        Self::reserve_exact(Address::here(LocalId::random()))
    }

    pub(super) fn get(&self) -> Address {
        self.address
    }

    /// Sets the socket at which other hosts reach the endpoint.
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

impl Drop for ReservedAddress {
    fn drop(&mut self) {
        RESERVED.lock().remove(&self.address.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_had_once_at_a_time() {
        let wanted = Address::here(LocalId::random());
        let first = ReservedAddress::reserve(Some(wanted)).unwrap();
        let second = ReservedAddress::reserve(Some(wanted)).unwrap();
        assert_eq!(first.get(), wanted);
        assert_ne!(second.get(), wanted);
        assert!(ReservedAddress::reserve_exact(wanted).is_err());
        drop(first);
        assert!(ReservedAddress::reserve_exact(wanted).is_ok());
    }
}
