//! The entries of a completion queue, and their formats.

use std::ffi::{c_int, c_void};

use memferry_message::MatchSpace;

use crate::abi::*;
use crate::guard::{FiError, Result};

/// A completed operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueuedCompletion {
    pub(crate) context: u64,
    pub(crate) flags: u64,
    pub(crate) length: usize,
    /// The address of a received message.
    pub(crate) buffer: *mut c_void,
    pub(crate) data: u64,
    pub(crate) tag: u64,
    /// The sender, as a number of the address vector.
    pub(crate) source: u64,
    /// The number of bytes that did not fit.
    pub(crate) excess: usize,
    /// The error code, or 0.
    pub(crate) code: c_int,
}

// SAFETY: the buffer is a value; only the program uses it.
unsafe impl Send for QueuedCompletion {}

impl QueuedCompletion {
    /// Creates an entry with only a context and flags.
    pub(crate) fn new(context: u64, flags: u64) -> Self {
        Self {
            context,
            flags,
            length: 0,
            buffer: std::ptr::null_mut(),
            data: 0,
            tag: 0,
            source: FI_ADDR_NOTAVAIL,
            excess: 0,
            code: 0,
        }
    }

    fn context(&self) -> *mut c_void {
        self.context as *mut c_void
    }

    /// The entry as an error of 1.17: the fields that later versions append are not written.
    pub(super) fn error(&self) -> CqErrEntry {
        CqErrEntry {
            op_context: self.context(),
            flags: self.flags,
            len: self.length,
            buf: self.buffer,
            data: self.data,
            tag: self.tag,
            olen: self.excess,
            err: self.code,
            prov_errno: self.code,
            err_data: std::ptr::null_mut(),
            err_data_size: 0,
        }
    }
}

/// The format in which a program reads entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CqFormat {
    Context,
    Message,
    Data,
    Tagged,
}

impl CqFormat {
    pub(super) fn new(format: c_int) -> Result<Self> {
        Ok(match format {
            FI_CQ_FORMAT_UNSPEC | FI_CQ_FORMAT_CONTEXT => Self::Context,
            FI_CQ_FORMAT_MSG => Self::Message,
            FI_CQ_FORMAT_DATA => Self::Data,
            FI_CQ_FORMAT_TAGGED => Self::Tagged,
            _ => return Err(FiError(FI_ENOSYS)),
        })
    }

    /// Writes an entry at an index of a program's array.
    ///
    /// # Safety
    /// The array must be aligned and valid for writes of at least `index + 1` entries of this
    /// format.
    #[inline]
    pub(super) unsafe fn write(self, entry: &QueuedCompletion, array: *mut c_void, index: usize) {
        let op_context = entry.context();
        let &QueuedCompletion { flags, length: len, buffer: buf, data, tag, .. } = entry;
        // SAFETY: the caller guarantees it.
        unsafe {
            match self {
                Self::Context => array.cast::<CqEntry>().add(index).write(CqEntry { op_context }),
                Self::Message => {
                    let entry = CqMsgEntry { op_context, flags, len };
                    array.cast::<CqMsgEntry>().add(index).write(entry);
                }
                Self::Data => {
                    let entry = CqDataEntry { op_context, flags, len, buf, data };
                    array.cast::<CqDataEntry>().add(index).write(entry);
                }
                Self::Tagged => {
                    let entry = CqTaggedEntry { op_context, flags, len, buf, data, tag };
                    array.cast::<CqTaggedEntry>().add(index).write(entry);
                }
            }
        }
    }
}

/// The flag of a match space.
#[inline]
pub(crate) fn space_flag(space: MatchSpace) -> u64 {
    match space {
        MatchSpace::Tagged => FI_TAGGED,
        MatchSpace::Untagged => FI_MSG,
        // Requests and replies make no entries of messages.
        MatchSpace::Service | MatchSpace::Reply => 0,
    }
}
