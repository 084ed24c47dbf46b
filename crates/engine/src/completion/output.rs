//! The output of a transfer, put together from what its parts report in any order.

use std::ptr::NonNull;

use memferry_sys::crc;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use crate::contract::Opcode;

/// The output of a successful transfer.
///
/// ```
/// use memferry::{Ferry, Request};
///
/// let ferry = Ferry::new()?;
/// let (left, right) = ([1u8, 2, 3], [1u8, 2, 4]);
/// let request = Request::compare(left.as_ptr(), right.as_ptr(), 3);
/// // SAFETY: both arrays live until the call returns, and nothing writes to them.
/// let output = unsafe { ferry.run_raw(request) }?;
/// assert_eq!(output.difference, Some(2));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TransferOutput {
    /// For a compare: the offset of the first byte that differs, if any.
    pub difference: Option<u64>,
    /// For a CRC, or a copy with one: the CRC-32C of the source.
    pub crc: Option<u32>,
}

/// A variable that gets the CRC of a transfer before the transfer is complete.
#[derive(Debug, Clone, Copy)]
pub struct CrcVariable(NonNull<u32>);

// SAFETY: only the thread that ends the transfer writes the variable, once, and the owner reads it
// after that.
unsafe impl Send for CrcVariable {}
// SAFETY: as above.
unsafe impl Sync for CrcVariable {}

impl CrcVariable {
    /// The variable at an address; `None` if that is null.
    pub fn new(variable: *mut u32) -> Option<Self> {
        NonNull::new(variable).map(Self)
    }

    /// Writes a CRC to a variable, if there are both.
    ///
    /// # Safety
    /// The variable must be valid for a write, and nothing else may access it during the call.
    pub unsafe fn store(variable: Option<Self>, crc: Option<u32>) {
        if let (Some(variable), Some(crc)) = (variable, crc) {
            // SAFETY: the caller guarantees what this needs.
            unsafe { variable.0.write(crc) };
        }
    }
}

/// What one part of a transfer reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PartOutput {
    /// Nothing, or a compare that found no difference.
    None,
    /// The offset in the part of the first difference.
    Difference(u64),
    /// The CRC-32C of the part.
    Crc(u32),
}

impl PartOutput {
    /// The output of a descriptor with this operation and value.
    #[inline]
    pub(crate) fn new(operation: Opcode, value: Option<u64>) -> Self {
        match value {
            None => Self::None,
            Some(crc) if operation.has_crc() => Self::Crc(crc as u32),
            Some(at) => Self::Difference(at),
        }
    }
}

/// No output, or no difference yet.
const NONE: u64 = u64::MAX;
/// Set if the other bits are a CRC. No offset is that large.
const CRC: u64 = 1 << 63;

/// The output so far. Parts add to it before the transfer is complete, users read it after that.
///
/// CRCs are linear, so a part adds the CRC of its bytes, shifted by the bytes behind it, with one
/// atomic operation: no part waits for those before it, and none is kept.
#[derive(Debug)]
pub(super) struct OutputCell(AtomicU64);

impl OutputCell {
    /// The output of a transfer of which no part has ended. `operation`: `None` if it is not known,
    /// for transfers of one descriptor.
    pub(super) fn new(operation: Option<Opcode>) -> Self {
        let has_crc = operation.is_some_and(Opcode::has_crc);
        Self(AtomicU64::new(if has_crc { CRC } else { NONE }))
    }

    /// Sets the output of a transfer of one descriptor.
    pub(super) fn set(&self, output: PartOutput) {
        match output {
            PartOutput::None => {}
            PartOutput::Difference(at) => self.0.store(at, Ordering::Relaxed),
            PartOutput::Crc(crc) => self.0.store(CRC | u64::from(crc), Ordering::Relaxed),
        }
    }

    /// Adds the output of a part at `offset`, with `bytes_behind` bytes of the transfer behind it.
    pub(super) fn add(&self, output: PartOutput, offset: u64, bytes_behind: u64) {
        match output {
            PartOutput::None => {}
            PartOutput::Difference(at) => {
                self.0.fetch_min(offset + at, Ordering::Relaxed);
            }
            PartOutput::Crc(crc) => {
                self.0.fetch_xor(crc::shift(crc, bytes_behind).into(), Ordering::Relaxed);
            }
        }
    }

    /// The output of a complete transfer.
    pub(super) fn load(&self) -> TransferOutput {
        match self.0.load(Ordering::Relaxed) {
            NONE => TransferOutput::default(),
            value if value & CRC != 0 => {
                TransferOutput { crc: Some(value as u32), ..TransferOutput::default() }
            }
            at => TransferOutput { difference: Some(at), ..TransferOutput::default() },
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn crc_of(bytes: &[u8]) -> u32 {
        // SAFETY: the slice is borrowed.
        unsafe { crc::append(0, bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn a_transfer_without_parts_has_the_crc_of_nothing_or_no_output() {
        let output = |operation| OutputCell::new(operation).load();
        assert_eq!(output(Some(Opcode::Crc)).crc, Some(0));
        assert_eq!(output(Some(Opcode::CopyCrc)).crc, Some(0));
        assert_eq!(output(Some(Opcode::Copy)), TransferOutput::default());
        assert_eq!(output(None), TransferOutput::default());
    }

    #[test]
    fn any_crc_is_told_from_no_output() {
        for crc in [0, 1, u32::MAX] {
            let cell = OutputCell::new(None);
            cell.set(PartOutput::Crc(crc));
            assert_eq!(cell.load(), TransferOutput { crc: Some(crc), difference: None });
        }
    }

    proptest! {
        #[test]
        fn parts_in_any_order_make_the_crc_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 1..2000),
            part_bytes in 1usize..300,
            order in prop::collection::vec(any::<prop::sample::Index>(), 2000),
        ) {
            let mut offsets: Vec<_> = (0..bytes.len()).step_by(part_bytes).collect();
            let cell = OutputCell::new(Some(Opcode::Crc));
            for pick in order {
                if offsets.is_empty() {
                    break;
                }
                let offset = offsets.swap_remove(pick.index(offsets.len()));
                let end = bytes.len().min(offset + part_bytes);
                let part = PartOutput::Crc(crc_of(&bytes[offset..end]));
                cell.add(part, offset as u64, (bytes.len() - end) as u64);
            }
            prop_assert!(offsets.is_empty());
            prop_assert_eq!(cell.load().crc, Some(crc_of(&bytes)));
        }
    }
}
