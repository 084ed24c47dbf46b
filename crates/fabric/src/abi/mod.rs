//! libfabric's binary interface in Rust: the structures, tables of functions and constants that a
//! provider and the core share, from the headers of 1.17.
//!
//! Names of fields and constants are libfabric's, whose manual explains them. Headers of 2.x only
//! append fields, so these definitions are right for both as long as nothing beyond their ends is
//! accessed. Every definition is also an entry of a list, which `tests/it/layout.rs` compares with
//! real headers.

// The manual of libfabric has a page for each of them.
#![allow(missing_docs)]

mod atomics;
mod attributes;
mod completion;
mod constants;
mod info;
mod messages;
mod objects;
mod operations;

pub use atomics::*;
pub use attributes::*;
pub use completion::*;
pub use constants::*;
pub use info::*;
pub use messages::*;
pub use objects::*;
pub use operations::*;

/// The layout of a structure.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// The C name.
    pub name: &'static str,
    /// The size in bytes.
    pub size: usize,
    /// Names, offsets and sizes of the fields.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// All structures.
pub fn layouts() -> impl Iterator<Item = &'static Layout> {
    [
        atomics::LAYOUTS,
        attributes::LAYOUTS,
        completion::LAYOUTS,
        info::LAYOUTS,
        messages::LAYOUTS,
        objects::LAYOUTS,
        operations::LAYOUTS,
    ]
    .into_iter()
    .flatten()
}

/// All constants, by name.
pub fn numbers() -> &'static [(&'static str, u64)] {
    constants::NUMBERS
}

/// Defines C structures, and the list `LAYOUTS` of them.
macro_rules! structures {
    ($($(#[$meta:meta])* $name:ident = $c:literal { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy)]
            pub struct $name { $(pub $field: $type,)* }
        )*

        pub(super) const LAYOUTS: &[super::Layout] = &[$(super::Layout {
            name: $c,
            size: size_of::<$name>(),
            fields: &[$((
                stringify!($field),
                std::mem::offset_of!($name, $field),
                size_of::<$type>(),
            ),)*],
        },)*];
    };
}
use structures;
