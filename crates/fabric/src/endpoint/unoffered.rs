//! Tables for what is not offered, so that a program that calls it nevertheless learns so.

use crate::abi::{OpsAtomic, OpsCollective, Unsupported};
use crate::guard::unsupported;

/// As long as the table it stands in for, and filled.
#[repr(C)]
struct Table<const SLOTS: usize> {
    size: usize,
    slots: [Unsupported; SLOTS],
}

const fn table<const SLOTS: usize>() -> Table<SLOTS> {
    Table { size: size_of::<Table<SLOTS>>(), slots: [unsupported; SLOTS] }
}

static ATOMICS: Table<13> = table();
static COLLECTIVES: Table<11> = table();

const _: () = assert!(size_of::<Table<13>>() == size_of::<OpsAtomic>());
const _: () = assert!(size_of::<Table<11>>() == size_of::<OpsCollective>());

pub(super) fn atomics() -> *const OpsAtomic {
    (&raw const ATOMICS).cast()
}

pub(super) fn collectives() -> *const OpsCollective {
    (&raw const COLLECTIVES).cast()
}
