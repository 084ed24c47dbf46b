//! Data of a call as contiguous bytes: in place for contiguous datatypes, packed by MPI for others.

use std::ffi::{c_int, c_void};

use crate::communicator::Context;
use crate::handles::Datatype;
use crate::library::Handle;
use crate::report;

/// Largest number of bytes of a buffer in a call that is executed here: `MPI_Pack` counts with `int`.
/// Calls with more are passed on, at all ranks.
pub(crate) const MAX_BYTES: usize = 1 << 30;

/// Elements of a datatype.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elements {
    pub(crate) count: usize,
    pub(crate) handle: Handle,
    /// The predefined datatype; `None` if data must be packed.
    pub(crate) plain: Option<Datatype>,
    /// Bytes of all elements without gaps. Equal at all ranks that exchange these elements.
    pub(crate) bytes: usize,
}

impl Elements {
    /// The elements of a call, or `None` if the call is to be passed on: there are none, they are too
    /// large, or an argument is wrong, which the MPI library reports.
    #[inline]
    pub(crate) fn of(context: &Context, count: i64, datatype: Handle) -> Option<Self> {
        let handle = context.library.handle(datatype);
        let count = usize::try_from(count).ok()?;
        let plain = context.handles.datatype(handle);
        let size = match plain {
            Some(datatype) => datatype.size,
            None => size_of(context, handle)?,
        };
        let bytes = count.checked_mul(size)?;
        (1..=MAX_BYTES).contains(&bytes).then_some(Self { count, handle, plain, bytes })
    }

    /// The elements of `times` consecutive blocks.
    pub(crate) fn times(self, times: usize) -> Option<Self> {
        let bytes = self.bytes.checked_mul(times).filter(|&bytes| bytes <= MAX_BYTES)?;
        Some(Self { count: self.count * times, bytes, ..self })
    }
}

#[cold]
fn size_of(context: &Context, handle: Handle) -> Option<usize> {
    if handle == context.handles.datatype_null || handle == 0 {
        return None;
    }
    let mut size: c_int = 0;
    // SAFETY: MPI is active, and writes one number.
    let code = unsafe { (context.library.functions.type_size)(handle, &mut size) };
    // A size that `int` cannot express is negative, and more than `MAX_BYTES`.
    if code == 0 { usize::try_from(size).ok() } else { None }
}

/// Contiguous bytes that are sent.
#[derive(Debug)]
pub(crate) enum SendBytes {
    /// The memory of the program.
    Plain(*const u8),
    /// A packed copy.
    Packed(Vec<u8>),
}

impl SendBytes {
    /// Makes the elements at an address contiguous. The error is a code of MPI, which has been reported.
    ///
    /// # Safety
    ///
    /// The elements are valid for reads.
    #[inline]
    pub(crate) unsafe fn new(
        context: &Context,
        from: *const c_void,
        elements: Elements,
    ) -> Result<Self, c_int> {
        if elements.plain.is_some() {
            return Ok(Self::Plain(from.cast()));
        }
        // SAFETY: as the caller promises.
        unsafe { pack(context, from, elements) }.map(Self::Packed)
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        match self {
            Self::Plain(start) => *start,
            Self::Packed(bytes) => bytes.as_ptr(),
        }
    }
}

/// Memory for contiguous bytes that are received.
#[derive(Debug)]
pub(crate) enum ReceiveBytes {
    /// The memory of the program.
    Plain(*mut u8),
    /// A packed copy, to be unpacked.
    Packed { bytes: Vec<u8>, to: *mut c_void, elements: Elements },
}

impl ReceiveBytes {
    /// Prepares memory for the elements at an address.
    #[inline]
    pub(crate) fn new(to: *mut c_void, elements: Elements) -> Self {
        match elements.plain {
            Some(_) => Self::Plain(to.cast()),
            None => Self::Packed { bytes: vec![0; elements.bytes], to, elements },
        }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Self::Plain(start) => *start,
            Self::Packed { bytes, .. } => bytes.as_mut_ptr(),
        }
    }

    /// Brings what was received to its place, if the collective succeeded. The error is a code of MPI,
    /// which has been reported.
    ///
    /// # Safety
    ///
    /// The elements are valid for writes.
    #[inline]
    pub(crate) unsafe fn finish(
        self,
        context: &Context,
        result: Result<(), c_int>,
    ) -> Result<(), c_int> {
        result?;
        let Self::Packed { bytes, to, elements } = self else { return Ok(()) };
        let (mut position, comm): (c_int, _) = (0, context.communicator.handle);
        let (size, count) = (bytes.len() as c_int, elements.count as c_int);
        // SAFETY: the bytes are valid, the caller promises it for the elements, and `MAX_BYTES` lets all
        // counts fit: no element is empty, so that there are at most as many as bytes.
        let code = unsafe {
            let unpack = context.library.functions.unpack;
            unpack(bytes.as_ptr().cast(), size, &mut position, to, count, elements.handle, comm)
        };
        if code == 0 { Ok(()) } else { Err(code) }
    }
}

/// # Safety
///
/// The elements are valid for reads.
unsafe fn pack(
    context: &Context,
    from: *const c_void,
    elements: Elements,
) -> Result<Vec<u8>, c_int> {
    let mut bytes = vec![0u8; elements.bytes];
    let (mut position, comm): (c_int, _) = (0, context.communicator.handle);
    let (size, count) = (bytes.len() as c_int, elements.count as c_int);
    // SAFETY: as in `finish`.
    let code = unsafe {
        let pack = context.library.functions.pack;
        pack(from, count, elements.handle, bytes.as_mut_ptr().cast(), size, &mut position, comm)
    };
    match code {
        0 if position == size => Ok(bytes),
        0 => Err(report::fail(context, "MPI_Pack adds something to the bytes of the elements")),
        code => Err(code),
    }
}
