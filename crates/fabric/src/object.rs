//! Objects as programs hold them: pointers to the visible beginnings of counted Rust objects.
//!
//! The program has one count of an object, and whatever was opened from it or bound to it has others:
//! an object that is in use is one with more than the program's.

use std::ops::Deref;
use std::sync::Arc;

use crate::abi::{FI_EBUSY, FI_EINVAL, Fid};
use crate::guard::{Code, Result};

/// The part of an object that programs see. It does not change once the object is there.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Visible<T>(T);

// SAFETY: nothing writes to it, and what its pointers point to is constant or the program's own.
unsafe impl<T> Send for Visible<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Visible<T> {}

impl<T> Visible<T> {
    pub(crate) fn new(visible: T) -> Self {
        Self(visible)
    }
}

impl<T> Deref for Visible<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// Something that programs hold.
///
/// # Safety
/// It must be `repr(C)` and begin with a [`Visible`] of a structure that begins with a [`Fid`] of that
/// class; no other object may have the class.
pub(crate) unsafe trait Object: Sized {
    /// The class that its visible part names.
    const CLASS: usize;
}

/// Hands an object to the program.
///
/// # Safety
/// `to` must be valid for writing a pointer.
pub(crate) unsafe fn give<T: Object, V>(object: Arc<T>, to: *mut *mut V) -> Result {
    if to.is_null() {
        return Err(Code(FI_EINVAL));
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(Arc::into_raw(object).cast_mut().cast()) };
    Ok(())
}

/// The object behind a pointer of the program.
///
/// # Safety
/// The pointer must come from [`give`] for a `T`, and the object must not be closed meanwhile.
#[inline]
pub(crate) unsafe fn borrow<'a, T: Object, V>(visible: *const V) -> &'a T {
    // SAFETY: the caller's promise.
    unsafe { &*visible.cast::<T>() }
}

/// A count of the object behind a pointer of the program.
///
/// # Safety
/// As for [`borrow`].
pub(crate) unsafe fn share<T: Object, V>(visible: *const V) -> Arc<T> {
    let object = visible.cast::<T>();
    // SAFETY: the caller's promise; the program's count stays.
    unsafe {
        Arc::increment_strong_count(object);
        Arc::from_raw(object)
    }
}

/// The object behind any pointer of the program's, if it is of this kind.
///
/// # Safety
/// The pointer must come from [`give`], and the object must not be closed meanwhile.
pub(crate) unsafe fn downcast<T: Object>(fid: *const Fid) -> Option<Arc<T>> {
    // SAFETY: all objects begin so; the class says which kind it is.
    unsafe { (!fid.is_null() && (*fid).fclass == T::CLASS).then(|| share(fid)) }
}

/// Takes an object back from the program, unless something still uses it.
///
/// # Safety
/// The pointer must come from [`give`] for a `T`; the program must not use it again after a success.
pub(crate) unsafe fn take<T: Object, V>(visible: *const V) -> Result<Arc<T>> {
    // SAFETY: the caller's promise.
    let object = unsafe { Arc::from_raw(visible.cast::<T>()) };
    if Arc::strong_count(&object) > 1 {
        let _ = Arc::into_raw(object);
        return Err(Code(FI_EBUSY));
    }
    Ok(object)
}
