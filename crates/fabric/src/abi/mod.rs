//! libfabric's binary interface in Rust: the structures, tables of functions and numbers that a
//! provider and the core share, as the headers of 1.17 have them.
//!
//! Names of fields and numbers are libfabric's, whose manual explains them. Headers of 2.x only add
//! at the ends, so what is here is right for both as long as nothing behind these ends is touched.
//! Every definition is also an entry of a list, which `tests/layout.rs` compares with real headers.

// The manual of libfabric has a page for each of them.
#![allow(missing_docs)]

mod attributes;
mod completion;
mod constants;
mod info;
mod messages;
mod objects;
mod operations;

pub use attributes::*;
pub use completion::*;
pub use constants::*;
pub use info::*;
pub use messages::*;
pub use objects::*;
pub use operations::*;

/// Where the fields of a structure lie.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// What C calls it.
    pub name: &'static str,
    /// Its bytes.
    pub size: usize,
    /// Names, offsets and sizes of the fields.
    pub fields: &'static [(&'static str, usize, usize)],
}

/// All structures.
pub fn layouts() -> impl Iterator<Item = &'static Layout> {
    [
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

/// All numbers, by name.
pub fn numbers() -> &'static [(&'static str, u64)] {
    constants::NUMBERS
}

/// Defines structures of C, and the list `LAYOUTS` of them.
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
