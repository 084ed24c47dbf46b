//! Objects that programs hold: pointers to the headers of reference-counted Rust objects.
//!
//! The program has one reference to an object, and each object that was opened from it or bound to
//! it has another: an object with more than the program's reference is in use.

use std::ops::Deref;
use std::sync::Arc;

use crate::abi::{FI_EBUSY, FI_EINVAL, Fid};
use crate::guard::{FiError, Result};

/// The part of an object that programs see. It does not change after the object is created.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct FidHeader<T>(T);

// SAFETY: nothing writes to it, and its pointers point to constants or to memory of the program.
unsafe impl<T> Send for FidHeader<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for FidHeader<T> {}

impl<T> FidHeader<T> {
    pub(crate) fn new(visible: T) -> Self {
        Self(visible)
    }
}

impl<T> Deref for FidHeader<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// An object that programs hold.
///
/// # Safety
/// It must be `repr(C)` and begin with a [`FidHeader`] of a structure that begins with a [`Fid`] of
/// that class; no other object may have the class.
pub(crate) unsafe trait FidObject: Sized {
    /// The class in the header.
    const CLASS: usize;
}

/// Passes an object to the program.
///
/// # Safety
/// `to` must be valid for writing a pointer.
pub(crate) unsafe fn into_raw<T: FidObject, V>(object: Arc<T>, to: *mut *mut V) -> Result {
    if to.is_null() {
        return Err(FiError(FI_EINVAL));
    }
    // SAFETY: the caller guarantees it.
    unsafe { to.write(Arc::into_raw(object).cast_mut().cast()) };
    Ok(())
}

/// Borrows the object behind a pointer of the program.
///
/// # Safety
/// The pointer must come from [`into_raw`] for a `T`, and the object must not be closed during the
/// borrow.
#[inline]
pub(crate) unsafe fn borrow<'a, T: FidObject, V>(visible: *const V) -> &'a T {
    // SAFETY: the caller guarantees it.
    unsafe { &*visible.cast::<T>() }
}

/// Takes a reference to the object behind a pointer of the program.
///
/// # Safety
/// As for [`borrow`].
pub(crate) unsafe fn share<T: FidObject, V>(visible: *const V) -> Arc<T> {
    let object = visible.cast::<T>();
    // SAFETY: the caller guarantees it; the program keeps its reference.
    unsafe {
        Arc::increment_strong_count(object);
        Arc::from_raw(object)
    }
}

/// Takes a reference to the object behind any pointer of the program, if it has this class.
///
/// # Safety
/// The pointer must come from [`into_raw`], and the object must not be closed during the call.
pub(crate) unsafe fn downcast<T: FidObject>(fid: *const Fid) -> Option<Arc<T>> {
    // SAFETY: all objects begin with a `Fid`, whose class names the type.
    unsafe { (!fid.is_null() && (*fid).fclass == T::CLASS).then(|| share(fid)) }
}

/// Takes the program's reference back, unless the object is in use.
///
/// # Safety
/// The pointer must come from [`into_raw`] for a `T`; the program must not use it again after a
/// success.
pub(crate) unsafe fn from_raw<T: FidObject, V>(visible: *const V) -> Result<Arc<T>> {
    // SAFETY: the caller guarantees it.
    let object = unsafe { Arc::from_raw(visible.cast::<T>()) };
    if Arc::strong_count(&object) > 1 {
        let _ = Arc::into_raw(object);
        return Err(FiError(FI_EBUSY));
    }
    Ok(object)
}
