//! The addresses of this process's endpoints. Programs open several endpoints from one info, of which
//! one can have the address that was asked for; the others get addresses of their own.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex};

use crate::abi::{FI_EADDRINUSE, FI_EADDRNOTAVAIL};
use crate::address::{Address, HostId, LocalId};
use crate::guard::{Code, Result};

static TAKEN: LazyLock<Mutex<HashSet<LocalId>>> = LazyLock::new(Mutex::default);

/// An address that no other endpoint of this process has.
#[derive(Debug)]
pub(super) struct OwnAddress(Address);

impl OwnAddress {
    /// The one that is wanted if it is free, else a new one.
    pub(super) fn take(wanted: Option<Address>) -> Result<Self> {
        match wanted.map(Self::exactly) {
            Some(Err(Code(FI_EADDRINUSE))) | None => {
                Self::exactly(Address::here(LocalId::random()))
            }
            Some(outcome) => outcome,
        }
    }

    /// The one that is wanted.
    pub(super) fn exactly(wanted: Address) -> Result<Self> {
        if wanted.host != HostId::ours() {
            return Err(Code(FI_EADDRNOTAVAIL));
        }
        let is_free = TAKEN.lock().unwrap().insert(wanted.id);
        if is_free { Ok(Self(wanted)) } else { Err(Code(FI_EADDRINUSE)) }
    }

    pub(super) fn get(&self) -> Address {
        self.0
    }
}

impl Drop for OwnAddress {
    fn drop(&mut self) {
        if let Ok(mut taken) = TAKEN.lock() {
            taken.remove(&self.0.id);
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
