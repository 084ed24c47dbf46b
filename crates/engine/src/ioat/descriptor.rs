//! What a channel is told to do: 64 bytes in memory for each transfer, each with the address of the
//! next.

/// The size of a descriptor, and what its address is a multiple of.
pub const DESCRIPTOR_BYTES: usize = 64;

/// Interrupts when it is finished.
const INTERRUPT: u32 = 1;
/// The processors' caches are not asked for the source, or for the target.
const NO_SNOOP: u32 = 0b11 << 1;
const NO_TARGET_SNOOP: u32 = 1 << 2;
const WRITE_BACK: u32 = 1 << 3;
const FENCE: u32 = 1 << 4;
const NULL: u32 = 1 << 5;
/// The transfer ends at the end of a page, of the source or of the target.
const PAGE_BREAKS: u32 = 0b11 << 6;
const TARGET_PAGE_BREAK: u32 = 1 << 7;
const BUNDLE: u32 = 1 << 8;
/// Where in the caches the target is put.
const CACHE_HINTS: u32 = 0b11 << 9;

const OPERATION_SHIFT: u32 = 24;
const COPY: u8 = 0x00;
const FILL: u8 = 0x01;

/// The bits beside the operation that a copy may have.
const COPY_FLAGS: u32 =
    INTERRUPT | NO_SNOOP | WRITE_BACK | FENCE | NULL | PAGE_BREAKS | BUNDLE | CACHE_HINTS;
/// The bits beside the operation that a fill may have.
const FILL_FLAGS: u32 =
    INTERRUPT | NO_TARGET_SNOOP | WRITE_BACK | FENCE | TARGET_PAGE_BREAK | BUNDLE;

/// A descriptor as the device reads it. Addresses are those that the device knows memory by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Descriptor {
    size: u32,
    control: u32,
    source: u64,
    target: u64,
    next: u64,
    reserved: [u64; 4],
}

const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR_BYTES);
const _: () = assert!(cfg!(target_endian = "little"), "descriptors are little-endian");

/// What a descriptor asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Copies from one address to another.
    Copy {
        /// Where it reads.
        source: u64,
        /// Where it writes.
        target: u64,
    },
    /// Writes eight bytes over and over.
    Fill {
        /// The bytes, the first lowest.
        pattern: u64,
        /// Where it writes.
        target: u64,
    },
    /// Nothing: only its being finished is told.
    Null,
}

impl Descriptor {
    /// Copies `bytes` bytes.
    pub const fn copy(source: u64, target: u64, bytes: u32) -> Self {
        Self::new(COPY, 0, source, target, bytes)
    }

    /// Writes `pattern`, beginning with its lowest byte, again and again over `bytes` bytes.
    pub const fn fill(pattern: u64, target: u64, bytes: u32) -> Self {
        Self::new(FILL, 0, pattern, target, bytes)
    }

    /// Does nothing, and is finished as others are.
    pub const fn null() -> Self {
        // Some devices refuse a size of 0 even here.
        Self::new(COPY, NULL, 0, 0, 8)
    }

    const fn new(operation: u8, flags: u32, source: u64, target: u64, size: u32) -> Self {
        let control = ((operation as u32) << OPERATION_SHIFT) | flags;
        Self { size, control, source, target, next: 0, reserved: [0; 4] }
    }

    /// The same, telling when it is finished: by writing its address to the completion word.
    #[must_use]
    pub const fn with_write_back(mut self) -> Self {
        self.control |= WRITE_BACK;
        self
    }

    /// The same, after which the channel goes on only when all of it is written.
    #[must_use]
    pub const fn with_fence(mut self) -> Self {
        self.control |= FENCE;
        self
    }

    /// The same, followed by the descriptor at an address.
    #[must_use]
    pub const fn with_next(mut self, next: u64) -> Self {
        self.next = next;
        self
    }

    /// The same with other control bits, whatever they mean: for tests of what devices refuse.
    #[must_use]
    pub const fn with_control(mut self, control: u32) -> Self {
        self.control = control;
        self
    }

    /// How many bytes it moves.
    pub const fn bytes(&self) -> u32 {
        self.size
    }

    /// The operation and its flags, as the device reads them.
    pub const fn control(&self) -> u32 {
        self.control
    }

    /// Where the next descriptor is.
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Whether it writes its address to the completion word when it is finished.
    pub const fn writes_back(&self) -> bool {
        self.control & WRITE_BACK != 0
    }

    /// What it asks for; `None` where that is nothing a device knows.
    pub const fn task(&self) -> Option<Task> {
        let (source, target) = (self.source, self.target);
        let flags = self.control & ((1 << OPERATION_SHIFT) - 1);
        match (self.control >> OPERATION_SHIFT) as u8 {
            COPY if flags & !COPY_FLAGS != 0 => None,
            COPY if flags & NULL != 0 => Some(Task::Null),
            COPY => Some(Task::Copy { source, target }),
            FILL if flags & !FILL_FLAGS == 0 => Some(Task::Fill { pattern: source, target }),
            _ => None,
        }
    }

    /// A descriptor from the eight words that it is in memory.
    pub const fn from_words(words: [u64; 8]) -> Self {
        let [sizes, source, target, next, a, b, c, d] = words;
        let (size, control) = (sizes as u32, (sizes >> 32) as u32);
        Self { size, control, source, target, next, reserved: [a, b, c, d] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(descriptor: Descriptor) -> [u64; 8] {
        // SAFETY: both are 64 bytes without padding, and every value of them is one.
        unsafe { std::mem::transmute::<Descriptor, [u64; 8]>(descriptor) }
    }

    #[test]
    fn a_copy_lies_in_memory_as_the_device_reads_it() {
        let copy = Descriptor::copy(0x1000, 0x2000, 300).with_write_back().with_next(0x40);
        assert_eq!(words(copy), [300 | (0b1000 << 32), 0x1000, 0x2000, 0x40, 0, 0, 0, 0]);
        assert_eq!(Descriptor::from_words(words(copy)), copy);
        assert_eq!(copy.task(), Some(Task::Copy { source: 0x1000, target: 0x2000 }));
        assert!(copy.writes_back());
    }

    #[test]
    fn a_fill_has_its_pattern_in_place_of_a_source() {
        let fill = Descriptor::fill(7, 0x2000, 64).with_fence();
        assert_eq!(words(fill)[..3], [64 | (0x0100_0010 << 32), 7, 0x2000]);
        assert_eq!(fill.task(), Some(Task::Fill { pattern: 7, target: 0x2000 }));
        assert!(!fill.writes_back());
    }

    #[test]
    fn a_null_descriptor_has_a_size_and_no_addresses() {
        let null = Descriptor::null();
        assert_eq!((null.task(), null.control()), (Some(Task::Null), 0x20));
        assert!(null.bytes() > 0);
    }

    #[test]
    fn what_no_device_knows_is_no_task() {
        let copy = Descriptor::copy(0, 0, 1);
        for control in [0x87 << 24, 0x02 << 24, 1 << 11, 1 << 23, (1 << 24) | (1 << 5)] {
            assert_eq!(copy.with_control(control).task(), None, "{control:#x}");
        }
    }
}
