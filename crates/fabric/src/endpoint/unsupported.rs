//! Tables of unsupported operations, so that a program that calls one gets an error.

use crate::abi::{OpsCollective, Unsupported};
use crate::guard::unsupported;

/// A filled table of the size of the table that it replaces.
#[repr(C)]
struct OpsTable<const SLOTS: usize> {
    size: usize,
    slots: [Unsupported; SLOTS],
}

const fn table<const SLOTS: usize>() -> OpsTable<SLOTS> {
    OpsTable { size: size_of::<OpsTable<SLOTS>>(), slots: [unsupported; SLOTS] }
}

static COLLECTIVES: OpsTable<11> = table();

const _: () = assert!(size_of::<OpsTable<11>>() == size_of::<OpsCollective>());

pub(super) fn collectives() -> *const OpsCollective {
    (&raw const COLLECTIVES).cast()
}
