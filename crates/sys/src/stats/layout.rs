//! The format of the page.
//!
//! All of it is words of 64 bits in the order of the machine. The header comes first, then the text that describes
//! the kinds of blocks, then the directory, then the blocks. [`header`] and [`entry`] have the places of the words.
//!
//! The text has a line for each kind: its name, and its fields in the order of their words, separated by spaces. A
//! field is a name and a shape: `c` is one counter, `g` one value that also falls, `b32` a histogram of bytes with
//! 32 classes, `n32` one of nanoseconds, and `l=full|unpinned` one counter for each label. Readers ignore kinds, fields
//! and shapes that they do not know, so new ones need no new version.

use std::sync::atomic::{AtomicU64, Ordering};

/// The first word of a page.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MEMFERRY");
/// The version of header and directory.
pub const VERSION: u64 = 1;
/// The length of a page in bytes. Most of it is never touched, and takes no memory.
pub const PAGE_BYTES: usize = 1 << 20;
/// The number of entries of the directory.
pub const MAX_BLOCKS: usize = 1024;
/// Where the text begins, and the bytes that it may have.
pub(super) const TEXT_AT: usize = 512;
pub(super) const MAX_TEXT_BYTES: usize = 4096 - TEXT_AT;
/// Where the directory and the blocks begin, in bytes.
pub(super) const DIRECTORY_AT: usize = 4096;
pub(super) const BLOCKS_AT: usize = DIRECTORY_AT + MAX_BLOCKS * entry::WORDS * 8;

/// The words of the header.
pub mod header {
    /// [`MAGIC`](super::MAGIC). Written last.
    pub const MAGIC: usize = 0;
    /// [`VERSION`](super::VERSION).
    pub const VERSION: usize = 1;
    /// Where the text begins, in bytes.
    pub const TEXT_AT: usize = 2;
    /// The length of the text in bytes.
    pub const TEXT_BYTES: usize = 3;
    /// Where the directory begins, in bytes.
    pub const DIRECTORY_AT: usize = 4;
    /// The number of its entries.
    pub const ENTRIES: usize = 5;
    /// The process, as it numbers itself.
    pub const PID: usize = 6;
    /// When the process started, as in `/proc/PID/stat`.
    pub const START_TICKS: usize = 7;
    /// The number of blocks that found no place.
    pub const BLOCKS_WITHOUT_PLACE: usize = 8;
    /// The name of the program, 64 bytes.
    pub const NAME: usize = 9;
    /// The words of the name.
    pub const NAME_WORDS: usize = 8;
}

/// The words of an entry of the directory.
pub mod entry {
    /// 0 if the entry is free. Else the number of the kind's line in the text, from 1, with the number of
    /// the entry's use in the upper half. Written last; a reader reads it again after the block.
    pub const KIND: usize = 0;
    /// Where the block begins, in bytes.
    pub const AT: usize = 1;
    /// The number of its words.
    pub const WORDS_OF_BLOCK: usize = 2;
    /// The number of what it counts for; [`ENDED`] if it has the sums of blocks that are gone.
    pub const ID: usize = 3;
    /// Its name, 96 bytes.
    pub const NAME: usize = 4;
    /// The words of the name.
    pub const NAME_WORDS: usize = 12;
    /// The words of an entry.
    pub const WORDS: usize = 16;
    /// The number of a block with the sums of those of its kind that are gone.
    pub const ENDED: u64 = u64::MAX;
}

/// A counter with a single writer.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds. Only for the writer of the block: of two threads that add at once, one may be lost.
    #[inline(always)]
    pub fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// Stores a value that the writer keeps elsewhere too.
    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value.
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What the words of a field are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One counter.
    Counter,
    /// One value that also falls.
    Gauge,
    /// A histogram of sizes in bytes.
    Sizes,
    /// A histogram of times in nanoseconds.
    Nanoseconds,
    /// A counter for each label.
    Labels(&'static [&'static str]),
}

impl Shape {
    /// The number of words.
    pub const fn words(self) -> usize {
        match self {
            Self::Counter | Self::Gauge => 1,
            Self::Sizes | Self::Nanoseconds => super::CLASSES,
            Self::Labels(labels) => labels.len(),
        }
    }

    /// The shape in the text of a page.
    pub(super) fn text(self) -> String {
        match self {
            Self::Counter => "c".into(),
            Self::Gauge => "g".into(),
            Self::Sizes => format!("b{}", super::CLASSES),
            Self::Nanoseconds => format!("n{}", super::CLASSES),
            Self::Labels(labels) => format!("l={}", labels.join("|")),
        }
    }
}

/// A field of a block.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its words.
    pub shape: Shape,
}

/// The counters of a block.
///
/// # Safety
/// The type must consist of [`Counter`]s alone, in the order of the fields of its kind in
/// [`kinds::ALL`](super::kinds::ALL), whose number is [`Counters::KIND`].
pub unsafe trait Counters: Default + Send + Sync + 'static {
    /// The number of the kind.
    const KIND: usize;
    /// The name of the kind.
    const NAME: &'static str;
    /// The fields, in order.
    const FIELDS: &'static [Field];
}

/// A kind of blocks: its name and its fields.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// Its fields.
    pub fields: &'static [Field],
}

/// The text that describes the kinds.
pub(super) fn text_of(kinds: &[Kind]) -> String {
    let field = |field: &Field| format!(" {}:{}", field.name, field.shape.text());
    let line = |kind: &Kind| {
        format!("{}{}\n", kind.name, kind.fields.iter().map(field).collect::<String>())
    };
    kinds.iter().map(line).collect()
}

/// Defines the counters of a kind.
macro_rules! counters {
    (@type counter) => { Counter };
    (@type gauge) => { Counter };
    (@type sizes) => { [Counter; $crate::stats::CLASSES] };
    (@type nanoseconds) => { [Counter; $crate::stats::CLASSES] };
    (@type [$($label:literal),*]) => { [Counter; <[&str]>::len(&[$($label),*])] };
    (@shape counter) => { Shape::Counter };
    (@shape gauge) => { Shape::Gauge };
    (@shape sizes) => { Shape::Sizes };
    (@shape nanoseconds) => { Shape::Nanoseconds };
    (@shape [$($label:literal),*]) => { Shape::Labels(&[$($label),*]) };
    (
        $(#[$attribute:meta])*
        $name:ident, $kind:literal, $number:literal {
            $($(#[$field_attribute:meta])* $field:ident: $shape:tt,)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Default)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_attribute])* pub $field: counters!(@type $shape),)*
        }

        // SAFETY: the fields are counters and arrays of them, in the order of the list.
        unsafe impl Counters for $name {
            const KIND: usize = $number;
            const NAME: &'static str = $kind;
            const FIELDS: &'static [Field] =
                &[$(Field { name: stringify!($field), shape: counters!(@shape $shape) }),*];
        }

        const _: () = {
            let mut words = 0;
            $(words += counters!(@shape $shape).words();)*
            assert!(size_of::<$name>() == words * 8);
        };
    };
}
pub(super) use counters;
