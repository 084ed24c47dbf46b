//! The descriptors of a work queue: 64 bytes that are submitted by one instruction, or lie in a
//! list that a batch descriptor names.

/// The size of a descriptor in bytes, and the alignment of a list of them.
pub const DESCRIPTOR_BYTES: usize = 64;

/// The opcodes of the device.
pub mod opcode {
    /// Does nothing; only its end is reported.
    pub const NOOP: u8 = 0x00;
    /// Executes a list of descriptors.
    pub const BATCH: u8 = 0x01;
    /// Waits for all earlier descriptors of the queue.
    pub const DRAIN: u8 = 0x02;
    /// Copies.
    pub const MEMMOVE: u8 = 0x03;
    /// Repeats a pattern of eight bytes.
    pub const FILL: u8 = 0x04;
    /// Compares two sources.
    pub const COMPARE: u8 = 0x05;
    /// Copies one source to two targets.
    pub const DUALCAST: u8 = 0x09;
    /// Computes the CRC-32C of a source.
    pub const CRC: u8 = 0x10;
    /// Copies, and computes the CRC-32C of the source.
    pub const COPY_CRC: u8 = 0x11;
}

/// The flags of a descriptor.
pub mod flag {
    /// In a batch: waits for all earlier descriptors of the batch.
    pub const FENCE: u32 = 1;
    /// Waits for the system to resolve a page fault, instead of a partial completion.
    pub const BLOCK_ON_FAULT: u32 = 1 << 1;
    /// The address of the completion record is valid.
    pub const RECORD_ADDRESS_VALID: u32 = 1 << 2;
    /// A completion record is written after success too.
    pub const REQUEST_RECORD: u32 = 1 << 3;
    /// Raises an interrupt at the end.
    pub const REQUEST_INTERRUPT: u32 = 1 << 4;
    /// The target is written to the processors' caches instead of to memory.
    pub const CACHE_CONTROL: u32 = 1 << 8;
    /// The device reads the target back before it reports the end.
    pub const READ_BACK: u32 = 1 << 14;

    /// The flags of every operation.
    pub(crate) const COMMON: u32 =
        FENCE | BLOCK_ON_FAULT | RECORD_ADDRESS_VALID | REQUEST_RECORD | REQUEST_INTERRUPT;
    /// The flags of operations that write a target.
    pub(crate) const WRITING: u32 = COMMON | CACHE_CONTROL | READ_BACK;
}

/// The bits of the second word that are flags; the opcode is above them.
const FLAG_BITS: u32 = (1 << OPCODE_SHIFT) - 1;
const OPCODE_SHIFT: u32 = 24;

/// The operation of a descriptor, with its addresses as the device knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DsaOperation {
    /// Does nothing; only its end is reported.
    Noop,
    /// Waits for all earlier descriptors of the queue.
    Drain,
    /// Executes `size` descriptors from an address on.
    Batch {
        /// The address of the first descriptor, a multiple of 64.
        list: u64,
    },
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
    /// Compares two sources.
    Compare {
        /// The first source.
        left: u64,
        /// The second source.
        right: u64,
    },
    /// Copies one source to two targets, which have the same offset in their pages.
    Dualcast {
        /// The source address.
        source: u64,
        /// The first target.
        target: u64,
        /// The second target.
        second: u64,
    },
    /// Computes the CRC-32C of a source.
    Crc {
        /// The source address.
        source: u64,
        /// The CRC of the bytes before the source, or 0.
        seed: u32,
    },
    /// Copies, and computes the CRC-32C of the source.
    CopyCrc {
        /// The source address.
        source: u64,
        /// The target address.
        target: u64,
        /// The CRC of the bytes before the source, or 0.
        seed: u32,
    },
}

/// Whether a dualcast can have these two targets: bits 11 to 0 of their addresses must be equal. The
/// device rejects others with the status
/// [`DUALCAST_OFFSETS`](super::record::status::DUALCAST_OFFSETS), which is `DSA_COMP_DCAST_ERR` in
/// the kernel's `idxd.h`. (SPDK demands more: both targets at the start of a page.)
pub const fn has_dualcast_offsets(target: u64, second: u64) -> bool {
    (target ^ second) & 0xFFF == 0
}

impl DsaOperation {
    /// The opcode.
    pub const fn opcode(&self) -> u8 {
        match self {
            Self::Noop => opcode::NOOP,
            Self::Drain => opcode::DRAIN,
            Self::Batch { .. } => opcode::BATCH,
            Self::Copy { .. } => opcode::MEMMOVE,
            Self::Fill { .. } => opcode::FILL,
            Self::Compare { .. } => opcode::COMPARE,
            Self::Dualcast { .. } => opcode::DUALCAST,
            Self::Crc { .. } => opcode::CRC,
            Self::CopyCrc { .. } => opcode::COPY_CRC,
        }
    }

    /// The flags that the device accepts with this operation.
    pub const fn valid_flags(&self) -> u32 {
        match self {
            Self::Noop | Self::Drain | Self::Batch { .. } => flag::COMMON & !flag::BLOCK_ON_FAULT,
            Self::Compare { .. } | Self::Crc { .. } => flag::COMMON,
            Self::Copy { .. }
            | Self::Fill { .. }
            | Self::Dualcast { .. }
            | Self::CopyCrc { .. } => flag::WRITING,
        }
    }

    /// The same operation without its first bytes, which are done. `None` if it cannot be resumed
    /// and must be repeated from the start.
    #[must_use]
    pub const fn after(self, bytes: u64) -> Option<Self> {
        Some(match self {
            Self::Copy { source, target } => {
                Self::Copy { source: source + bytes, target: target + bytes }
            }
            Self::Fill { pattern, target } => Self::Fill {
                pattern: pattern.rotate_right((bytes % 8) as u32 * 8),
                target: target + bytes,
            },
            Self::Compare { left, right } => {
                Self::Compare { left: left + bytes, right: right + bytes }
            }
            Self::Dualcast { source, target, second } => Self::Dualcast {
                source: source + bytes,
                target: target + bytes,
                second: second + bytes,
            },
            Self::Noop
            | Self::Drain
            | Self::Batch { .. }
            | Self::Crc { .. }
            | Self::CopyCrc { .. } => return None,
        })
    }
}

/// A descriptor in the layout of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DsaDescriptor {
    words: [u64; 8],
}

const _: () = assert!(size_of::<DsaDescriptor>() == DESCRIPTOR_BYTES);
const _: () = assert!(cfg!(target_endian = "little"), "descriptors are little-endian");

impl DsaDescriptor {
    /// Creates a descriptor over `size` bytes; for a batch, `size` descriptors.
    pub const fn new(operation: DsaOperation, size: u32) -> Self {
        let mut words = [0; 8];
        words[0] = (operation.opcode() as u64) << (32 + OPCODE_SHIFT);
        words[4] = size as u64;
        match operation {
            DsaOperation::Noop | DsaOperation::Drain => {}
            DsaOperation::Batch { list } => words[2] = list,
            DsaOperation::Copy { source, target } => (words[2], words[3]) = (source, target),
            DsaOperation::Fill { pattern, target } => (words[2], words[3]) = (pattern, target),
            DsaOperation::Compare { left, right } => (words[2], words[3]) = (left, right),
            DsaOperation::Dualcast { source, target, second } => {
                (words[2], words[3], words[5]) = (source, target, second);
            }
            DsaOperation::Crc { source, seed } => (words[2], words[5]) = (source, seed as u64),
            DsaOperation::CopyCrc { source, target, seed } => {
                (words[2], words[3], words[5]) = (source, target, seed as u64);
            }
        }
        Self { words }
    }

    /// Adds flags.
    #[must_use]
    pub const fn with_flags(mut self, flags: u32) -> Self {
        self.words[0] |= ((flags & FLAG_BITS) as u64) << 32;
        self
    }

    /// Reports the end to a completion record.
    #[must_use]
    pub const fn with_record(mut self, address: u64) -> Self {
        self.words[1] = address;
        self.with_flags(flag::RECORD_ADDRESS_VALID | flag::REQUEST_RECORD)
    }

    /// Raises the interrupt with this handle at the end.
    #[must_use]
    pub const fn with_interrupt(mut self, handle: u16) -> Self {
        self.words[4] |= (handle as u64) << 32;
        self.with_flags(flag::REQUEST_INTERRUPT)
    }

    /// The handle of the interrupt that it raises, if it does.
    pub const fn interrupt(&self) -> Option<u16> {
        match self.flags() & flag::REQUEST_INTERRUPT {
            0 => None,
            _ => Some((self.words[4] >> 32) as u16),
        }
    }

    /// The flags.
    pub const fn flags(&self) -> u32 {
        (self.words[0] >> 32) as u32 & FLAG_BITS
    }

    /// The opcode.
    pub const fn opcode(&self) -> u8 {
        (self.words[0] >> (32 + OPCODE_SHIFT)) as u8
    }

    /// The address of the completion record, if there is one.
    pub const fn record(&self) -> Option<u64> {
        match self.flags() & flag::RECORD_ADDRESS_VALID {
            0 => None,
            _ => Some(self.words[1]),
        }
    }

    /// The length in bytes; for a batch, the number of descriptors.
    pub const fn size(&self) -> u32 {
        self.words[4] as u32
    }

    /// Decodes the operation; `None` if it is none of those above.
    pub const fn operation(&self) -> Option<DsaOperation> {
        let [_, _, a, b, _, c, _, _] = self.words;
        Some(match self.opcode() {
            opcode::NOOP => DsaOperation::Noop,
            opcode::DRAIN => DsaOperation::Drain,
            opcode::BATCH => DsaOperation::Batch { list: a },
            opcode::MEMMOVE => DsaOperation::Copy { source: a, target: b },
            opcode::FILL => DsaOperation::Fill { pattern: a, target: b },
            opcode::COMPARE => DsaOperation::Compare { left: a, right: b },
            opcode::DUALCAST => DsaOperation::Dualcast { source: a, target: b, second: c },
            opcode::CRC => DsaOperation::Crc { source: a, seed: c as u32 },
            opcode::COPY_CRC => DsaOperation::CopyCrc { source: a, target: b, seed: c as u32 },
            _ => return None,
        })
    }

    /// Whether the fields that its operation does not use are zero, as the device demands.
    pub const fn has_clean_reserved_fields(&self) -> bool {
        let Some(operation) = self.operation() else { return false };
        let mut clean = Self::new(operation, self.size());
        if let Some(handle) = self.interrupt() {
            clean = clean.with_interrupt(handle);
        }
        // The first word is decoded, the second is the record's address.
        let mut index = 2;
        while index < 8 {
            if clean.words[index] != self.words[index] {
                return false;
            }
            index += 1;
        }
        self.words[0] & 0xFFFF_FFFF == 0
    }

    /// The eight words in memory.
    pub const fn words(&self) -> [u64; 8] {
        self.words
    }

    /// Creates a descriptor from its eight words in memory.
    pub const fn from_words(words: [u64; 8]) -> Self {
        Self { words }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_lies_in_memory_as_the_device_reads_it() {
        let copy = DsaOperation::Copy { source: 0x1000, target: 0x2000 };
        let descriptor = DsaDescriptor::new(copy, 300).with_record(0x40);
        assert_eq!(descriptor.words(), [0x0300_000C << 32, 0x40, 0x1000, 0x2000, 300, 0, 0, 0]);
        assert_eq!(DsaDescriptor::from_words(descriptor.words()).operation(), Some(copy));
        assert_eq!((descriptor.record(), descriptor.size()), (Some(0x40), 300));
    }

    #[test]
    fn every_operation_is_read_as_it_was_written() {
        let (source, target, second, seed) = (0x1000, 0x2000, 0x3000, 0x89AB_CDEF);
        for operation in [
            DsaOperation::Noop,
            DsaOperation::Drain,
            DsaOperation::Batch { list: source },
            DsaOperation::Copy { source, target },
            DsaOperation::Fill { pattern: source, target },
            DsaOperation::Compare { left: source, right: target },
            DsaOperation::Dualcast { source, target, second },
            DsaOperation::Crc { source, seed },
            DsaOperation::CopyCrc { source, target, seed },
        ] {
            let descriptor = DsaDescriptor::new(operation, 64).with_flags(flag::FENCE);
            assert_eq!(descriptor.operation(), Some(operation));
            assert_eq!((descriptor.flags(), descriptor.record()), (flag::FENCE, None));
            assert!(descriptor.has_clean_reserved_fields(), "{operation:?}");
        }
    }

    #[test]
    fn the_second_target_and_the_seed_are_at_byte_40() {
        let dualcast = DsaOperation::Dualcast { source: 1, target: 2, second: 3 };
        assert_eq!(DsaDescriptor::new(dualcast, 8).words()[2..6], [1, 2, 8, 3]);
        let crc = DsaOperation::CopyCrc { source: 1, target: 2, seed: 9 };
        assert_eq!(DsaDescriptor::new(crc, 8).words()[2..6], [1, 2, 8, 9]);
    }

    #[test]
    fn what_is_left_in_a_reserved_field_is_noticed() {
        let copy = DsaDescriptor::new(DsaOperation::Copy { source: 1, target: 2 }, 8);
        for index in [5, 6, 7] {
            let mut words = copy.words();
            words[index] = 1;
            assert!(!DsaDescriptor::from_words(words).has_clean_reserved_fields(), "{index}");
        }
        let mut words = copy.words();
        words[0] |= 1 << 31;
        assert!(!DsaDescriptor::from_words(words).has_clean_reserved_fields());
    }

    #[test]
    fn the_rest_of_an_operation_begins_where_the_first_part_ended() {
        let copy = DsaOperation::Copy { source: 100, target: 200 };
        assert_eq!(copy.after(7), Some(DsaOperation::Copy { source: 107, target: 207 }));
        let fill = DsaOperation::Fill { pattern: 0x0807_0605_0403_0201, target: 0 };
        let rest = DsaOperation::Fill { pattern: 0x0201_0807_0605_0403, target: 10 };
        assert_eq!(fill.after(10), Some(rest), "the pattern continues");
        assert_eq!(DsaOperation::Crc { source: 0, seed: 0 }.after(1), None);
    }
}
