//! The descriptors of a channel: 64 bytes in memory for each transfer, each with the address of the
//! next.

/// The size and alignment of a descriptor in bytes.
pub const DESCRIPTOR_BYTES: usize = 64;

/// Raises an interrupt at the end.
const INTERRUPT: u32 = 1;
/// The device does not snoop the processors' caches for the source, or for the target.
const NO_SNOOP: u32 = 0b11 << 1;
const NO_TARGET_SNOOP: u32 = 1 << 2;
const WRITE_BACK: u32 = 1 << 3;
const FENCE: u32 = 1 << 4;
const NULL: u32 = 1 << 5;
/// The transfer ends at the end of a page, of the source or of the target.
const PAGE_BREAKS: u32 = 0b11 << 6;
const TARGET_PAGE_BREAK: u32 = 1 << 7;
const BUNDLE: u32 = 1 << 8;
/// Hints for the cache that receives the target.
const CACHE_HINTS: u32 = 0b11 << 9;

const OPERATION_SHIFT: u32 = 24;
const COPY: u8 = 0x00;
const FILL: u8 = 0x01;

/// The valid bits of a copy, beside the operation.
const COPY_FLAGS: u32 =
    INTERRUPT | NO_SNOOP | WRITE_BACK | FENCE | NULL | PAGE_BREAKS | BUNDLE | CACHE_HINTS;
/// The valid bits of a fill, beside the operation.
const FILL_FLAGS: u32 =
    INTERRUPT | NO_TARGET_SNOOP | WRITE_BACK | FENCE | TARGET_PAGE_BREAK | BUNDLE;

/// A descriptor in the layout of the device. Addresses are IOVAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct IoatDescriptor {
    size: u32,
    control: u32,
    source: u64,
    target: u64,
    next: u64,
    reserved: [u64; 4],
}

const _: () = assert!(size_of::<IoatDescriptor>() == DESCRIPTOR_BYTES);
const _: () = assert!(cfg!(target_endian = "little"), "descriptors are little-endian");

/// The operation of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoatOperation {
    /// Copies from one address to another.
    Copy {
        /// The source address.
        source: u64,
        /// The target address.
        target: u64,
    },
    /// Repeats a pattern of eight bytes.
    Fill {
        /// The pattern, with the first byte lowest.
        pattern: u64,
        /// The target address.
        target: u64,
    },
    /// Does nothing; only its end is reported.
    Null,
}

impl IoatDescriptor {
    /// Copies `bytes` bytes.
    pub const fn copy(source: u64, target: u64, bytes: u32) -> Self {
        Self::new(COPY, 0, source, target, bytes)
    }

    /// Repeats `pattern`, starting with its lowest byte, over `bytes` bytes.
    pub const fn fill(pattern: u64, target: u64, bytes: u32) -> Self {
        Self::new(FILL, 0, pattern, target, bytes)
    }

    /// Does nothing, and completes like other descriptors.
    pub const fn null() -> Self {
        // Some devices reject a size of 0 even here.
        Self::new(COPY, NULL, 0, 0, 8)
    }

    const fn new(operation: u8, flags: u32, source: u64, target: u64, size: u32) -> Self {
        let control = ((operation as u32) << OPERATION_SHIFT) | flags;
        Self { size, control, source, target, next: 0, reserved: [0; 4] }
    }

    /// Writes its address to the completion word at the end.
    #[must_use]
    pub const fn with_write_back(mut self) -> Self {
        self.control |= WRITE_BACK;
        self
    }

    /// Makes the channel wait until all of it is written before the next descriptor.
    #[must_use]
    pub const fn with_fence(mut self) -> Self {
        self.control |= FENCE;
        self
    }

    /// Raises an interrupt at the end.
    #[must_use]
    pub const fn with_interrupt(mut self) -> Self {
        self.control |= INTERRUPT;
        self
    }

    /// Whether it raises an interrupt at the end.
    pub const fn raises_interrupt(&self) -> bool {
        self.control & INTERRUPT != 0
    }

    /// Sets the address of the next descriptor.
    #[must_use]
    pub const fn with_next(mut self, next: u64) -> Self {
        self.next = next;
        self
    }

    /// Sets any control bits, for tests of what devices reject.
    #[must_use]
    pub const fn with_control(mut self, control: u32) -> Self {
        self.control = control;
        self
    }

    /// The length in bytes.
    pub const fn bytes(&self) -> u32 {
        self.size
    }

    /// The operation and its flags, as the device reads them.
    pub const fn control(&self) -> u32 {
        self.control
    }

    /// The address of the next descriptor.
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Whether it writes its address to the completion word at the end.
    pub const fn writes_back(&self) -> bool {
        self.control & WRITE_BACK != 0
    }

    /// Decodes the operation; `None` if no device supports it.
    pub const fn operation(&self) -> Option<IoatOperation> {
        let (source, target) = (self.source, self.target);
        let flags = self.control & ((1 << OPERATION_SHIFT) - 1);
        match (self.control >> OPERATION_SHIFT) as u8 {
            COPY if flags & !COPY_FLAGS != 0 => None,
            COPY if flags & NULL != 0 => Some(IoatOperation::Null),
            COPY => Some(IoatOperation::Copy { source, target }),
            FILL if flags & !FILL_FLAGS == 0 => {
                Some(IoatOperation::Fill { pattern: source, target })
            }
            _ => None,
        }
    }

    /// The words in memory before the address of the next descriptor.
    pub const fn command_words(&self) -> [u64; 3] {
        [self.size as u64 | (self.control as u64) << 32, self.source, self.target]
    }

    /// The eight words in memory.
    pub const fn words(&self) -> [u64; 8] {
        let [a, b, c, d] = self.reserved;
        let [sizes, source, target] = self.command_words();
        [sizes, source, target, self.next, a, b, c, d]
    }

    /// Creates a descriptor from its eight words in memory.
    pub const fn from_words(words: [u64; 8]) -> Self {
        let [sizes, source, target, next, a, b, c, d] = words;
        let (size, control) = (sizes as u32, (sizes >> 32) as u32);
        Self { size, control, source, target, next, reserved: [a, b, c, d] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(descriptor: IoatDescriptor) -> [u64; 8] {
        // SAFETY: both are 64 bytes without padding, and every bit pattern is valid.
        unsafe { std::mem::transmute::<IoatDescriptor, [u64; 8]>(descriptor) }
    }

    #[test]
    fn a_copy_lies_in_memory_as_the_device_reads_it() {
        let copy = IoatDescriptor::copy(0x1000, 0x2000, 300).with_write_back().with_next(0x40);
        assert_eq!(words(copy), [300 | (0b1000 << 32), 0x1000, 0x2000, 0x40, 0, 0, 0, 0]);
        assert_eq!(IoatDescriptor::from_words(words(copy)), copy);
        assert_eq!(copy.operation(), Some(IoatOperation::Copy { source: 0x1000, target: 0x2000 }));
        assert!(copy.writes_back());
    }

    #[test]
    fn a_fill_has_its_pattern_in_place_of_a_source() {
        let fill = IoatDescriptor::fill(7, 0x2000, 64).with_fence();
        assert_eq!(words(fill)[..3], [64 | (0x0100_0010 << 32), 7, 0x2000]);
        assert_eq!(fill.operation(), Some(IoatOperation::Fill { pattern: 7, target: 0x2000 }));
        assert!(!fill.writes_back());
    }

    #[test]
    fn a_null_descriptor_has_a_size_and_no_addresses() {
        let null = IoatDescriptor::null();
        assert_eq!((null.operation(), null.control()), (Some(IoatOperation::Null), 0x20));
        assert!(null.bytes() > 0);
    }

    #[test]
    fn what_no_device_knows_is_no_task() {
        let copy = IoatDescriptor::copy(0, 0, 1);
        for control in [0x87 << 24, 0x02 << 24, 1 << 11, 1 << 23, (1 << 24) | (1 << 5)] {
            assert_eq!(copy.with_control(control).operation(), None, "{control:#x}");
        }
    }
}
