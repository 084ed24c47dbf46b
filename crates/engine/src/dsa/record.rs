//! The completion record: 32 bytes that the device writes at the end of a descriptor.
//!
//! The record is data of a device, so nothing of it is used unchecked: [`CompletionRecord::decode`]
//! compares every field with the descriptor that it belongs to.

/// The size and alignment of a record in bytes.
pub const RECORD_BYTES: usize = 32;

/// The status codes of a record.
pub mod status {
    /// The descriptor has not ended.
    pub const NONE: u8 = 0x00;
    /// Success.
    pub const SUCCESS: u8 = 0x01;
    /// Success, and the result differs from the expected one.
    pub const SUCCESS_UNEXPECTED: u8 = 0x02;
    /// Partial completion: a page is not present.
    pub const PAGE_FAULT: u8 = 0x03;
    /// Partial completion: the response to a page request was invalid.
    pub const PAGE_REQUEST_FAILED: u8 = 0x04;
    /// A descriptor of the batch failed.
    pub const BATCH_FAILED: u8 = 0x05;
    /// The list of the batch is not present.
    pub const BATCH_PAGE_FAULT: u8 = 0x06;
    /// The opcode is not supported.
    pub const BAD_OPCODE: u8 = 0x10;
    /// A flag is not valid with this operation.
    pub const INVALID_FLAGS: u8 = 0x11;
    /// A reserved field is not zero.
    pub const RESERVED_FIELD: u8 = 0x12;
    /// The length is 0 or exceeds the maximum of the queue.
    pub const TRANSFER_SIZE: u8 = 0x13;
    /// The number of descriptors is less than 2 or exceeds the maximum of the queue.
    pub const DESCRIPTOR_COUNT: u8 = 0x14;
    /// Source and target overlap.
    pub const OVERLAP: u8 = 0x16;
    /// The two targets of a dualcast have different offsets in their pages.
    pub const DUALCAST_OFFSETS: u8 = 0x17;
    /// The list of descriptors is not aligned.
    pub const LIST_ALIGNMENT: u8 = 0x18;
    /// The completion record is not aligned.
    pub const RECORD_ALIGNMENT: u8 = 0x1B;
    /// The hardware failed.
    pub const HARDWARE: u8 = 0x20;
    /// An address could not be translated.
    pub const TRANSLATION: u8 = 0x22;

    /// The bits of the status byte that are the code.
    pub const MASK: u8 = 0x7F;
    /// Set in the status byte if a fault was a write.
    pub const WRITE: u8 = 0x80;
}

/// The reason of a failure, by its status code.
pub const fn status_reason(code: u8) -> &'static str {
    match code & status::MASK {
        status::PAGE_FAULT => "the device could not access a page",
        status::PAGE_REQUEST_FAILED => "the system refused a page to the device",
        status::BATCH_FAILED => "a descriptor of the batch failed",
        status::BATCH_PAGE_FAULT => "the device could not read the list of a batch",
        0x07 | 0x08 => "an offset in a delta record is wrong",
        0x09 => "a data integrity field is wrong",
        status::BAD_OPCODE => "the device does not support the operation",
        status::INVALID_FLAGS => "a flag is not valid with the operation",
        status::RESERVED_FIELD => "a reserved field is not zero",
        status::TRANSFER_SIZE => "the length exceeds the maximum of the queue",
        status::DESCRIPTOR_COUNT => "the batch has too few or too many descriptors",
        0x15 => "the size of a delta record is out of range",
        status::OVERLAP => "source and target overlap",
        status::DUALCAST_OFFSETS => "the two targets have different offsets in their pages",
        status::LIST_ALIGNMENT => "the list of a batch is not aligned",
        0x19 => "the interrupt handle is invalid",
        0x1A => "the address of the completion record cannot be translated",
        status::RECORD_ALIGNMENT => "the completion record is not aligned",
        0x1C => "an address is not aligned",
        0x1D => "the privilege of the descriptor is wrong",
        0x1E => "the traffic class is wrong",
        0x1F => "the device could not access a page that it reads back",
        status::HARDWARE | 0x21 => "the hardware of the device failed",
        status::TRANSLATION => "an address could not be translated",
        _ => "the device reports an unknown error",
    }
}

/// A completion record as the device wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletionRecord {
    words: [u64; 4],
}

/// What a valid record says of its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordOutcome {
    /// The descriptor has not ended.
    Pending,
    /// Success. For a compare, the offset of the first difference; for a CRC, its value.
    Done(Option<u64>),
    /// A page was not present. The bytes before `done_bytes` are complete.
    PageFault {
        /// The number of bytes that are complete.
        done_bytes: u64,
        /// An address in the page.
        address: u64,
        /// Whether the device wanted to write.
        is_write: bool,
    },
    /// Failure.
    Failed(&'static str),
}

/// What the record of a descriptor may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordKind {
    /// Success has no result.
    Plain,
    /// The result is 1 if there is a difference, whose offset is in the bytes completed.
    Compare,
    /// A CRC-32C.
    Crc,
}

/// The reason of a failure that the record itself shows to be invalid.
pub(crate) const INVALID_RECORD: &str = "the device wrote an invalid completion record";

impl CompletionRecord {
    /// Creates a record; for models of the device.
    pub const fn new(status: u8, result: u8, completed: u32, address: u64, value: u32) -> Self {
        let first = status as u64 | (result as u64) << 8 | (completed as u64) << 32;
        Self { words: [first, address, value as u64, 0] }
    }

    /// Creates a record from its four words in memory.
    pub const fn from_words(words: [u64; 4]) -> Self {
        Self { words }
    }

    /// The four words in memory.
    pub const fn words(&self) -> [u64; 4] {
        self.words
    }

    /// The status code, without the bit of a write.
    pub const fn code(&self) -> u8 {
        self.words[0] as u8 & status::MASK
    }

    /// The number of bytes completed; of a batch, the number of descriptors.
    pub const fn completed(&self) -> u32 {
        (self.words[0] >> 32) as u32
    }

    /// Decodes the record of a descriptor of `length` bytes.
    pub const fn decode(&self, kind: RecordKind, length: u32) -> RecordOutcome {
        let [first, address, value, _] = self.words;
        let (result, completed) = ((first >> 8) as u8, self.completed());
        match self.code() {
            status::NONE if first as u8 == 0 => RecordOutcome::Pending,
            status::SUCCESS => match (kind, result) {
                (RecordKind::Plain, _) => RecordOutcome::Done(None),
                (RecordKind::Crc, _) => RecordOutcome::Done(Some(value & 0xFFFF_FFFF)),
                (RecordKind::Compare, 0) => RecordOutcome::Done(None),
                (RecordKind::Compare, 1) if completed < length => {
                    RecordOutcome::Done(Some(completed as u64))
                }
                (RecordKind::Compare, _) => RecordOutcome::Failed(INVALID_RECORD),
            },
            status::PAGE_FAULT if completed <= length => RecordOutcome::PageFault {
                done_bytes: completed as u64,
                address,
                is_write: first as u8 & status::WRITE != 0,
            },
            status::PAGE_FAULT | status::NONE => RecordOutcome::Failed(INVALID_RECORD),
            _ => RecordOutcome::Failed(status_reason(self.code())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_record_lies_in_memory_as_the_device_writes_it() {
        let record = CompletionRecord::new(0x83, 1, 0x1122_3344, 0x5000, 0x89AB_CDEF);
        assert_eq!(record.words(), [0x1122_3344_0000_0183, 0x5000, 0x89AB_CDEF, 0]);
        assert_eq!((record.code(), record.completed()), (3, 0x1122_3344));
    }

    #[test]
    fn success_has_the_result_of_its_operation() {
        let success = |result, completed| CompletionRecord::new(1, result, completed, 0, 7);
        let done = RecordOutcome::Done;
        assert_eq!(success(0, 0).decode(RecordKind::Plain, 64), done(None));
        assert_eq!(success(0, 0).decode(RecordKind::Crc, 64), done(Some(7)));
        assert_eq!(success(0, 0).decode(RecordKind::Compare, 64), done(None));
        assert_eq!(success(1, 63).decode(RecordKind::Compare, 64), done(Some(63)));
        let invalid = RecordOutcome::Failed(INVALID_RECORD);
        assert_eq!(success(1, 64).decode(RecordKind::Compare, 64), invalid);
        assert_eq!(success(2, 0).decode(RecordKind::Compare, 64), invalid);
    }

    #[test]
    fn a_page_fault_names_its_page_and_what_was_done_before() {
        let read = CompletionRecord::new(3, 0, 10, 0x5000, 0).decode(RecordKind::Plain, 64);
        let fault = RecordOutcome::PageFault { done_bytes: 10, address: 0x5000, is_write: false };
        assert_eq!(read, fault);
        let write = CompletionRecord::new(0x83, 0, 0, 0x5000, 0).decode(RecordKind::Plain, 64);
        assert!(matches!(write, RecordOutcome::PageFault { is_write: true, .. }));
        let beyond = CompletionRecord::new(3, 0, 65, 0, 0).decode(RecordKind::Plain, 64);
        assert_eq!(beyond, RecordOutcome::Failed(INVALID_RECORD));
    }

    #[test]
    fn every_failure_has_a_reason_and_no_record_is_pending() {
        for code in 4..=status::MASK {
            let record = CompletionRecord::new(code, 0, 0, 0, 0);
            let RecordOutcome::Failed(reason) = record.decode(RecordKind::Plain, 64) else {
                panic!("{code:#x} is a failure");
            };
            assert!(!reason.is_empty());
        }
        let none = CompletionRecord::from_words([0; 4]);
        assert_eq!(none.decode(RecordKind::Crc, 64), RecordOutcome::Pending);
        let write_of_nothing = CompletionRecord::new(status::WRITE, 0, 0, 0, 0);
        let outcome = write_of_nothing.decode(RecordKind::Plain, 64);
        assert_eq!(outcome, RecordOutcome::Failed(INVALID_RECORD));
    }

    proptest! {
        #[test]
        fn whatever_a_device_writes_never_names_bytes_outside_of_the_descriptor(
            words in any::<[u64; 4]>(),
            kind in prop_oneof![
                Just(RecordKind::Plain), Just(RecordKind::Compare), Just(RecordKind::Crc)
            ],
            length in 1u32..,
        ) {
            match CompletionRecord::from_words(words).decode(kind, length) {
                RecordOutcome::Pending => prop_assert_eq!(words[0] as u8, 0),
                RecordOutcome::Done(None) => prop_assert!(kind != RecordKind::Crc),
                RecordOutcome::Done(Some(at)) if kind == RecordKind::Compare => {
                    prop_assert!(at < u64::from(length));
                }
                RecordOutcome::Done(Some(crc)) => {
                    prop_assert!(kind == RecordKind::Crc && crc <= u64::from(u32::MAX));
                }
                RecordOutcome::PageFault { done_bytes, .. } => {
                    prop_assert!(done_bytes <= u64::from(length));
                }
                RecordOutcome::Failed(reason) => prop_assert!(!reason.is_empty()),
            }
        }
    }
}
