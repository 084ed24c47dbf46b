//! Numbers as the bytes they are made of, and memory for them on pages of its own.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use memferry::sys::pages::Pages;

/// Types that are nothing but their bytes.
///
/// # Safety
///
/// Every pattern of bytes is a value, there is no padding, and the alignment is at most a page's.
pub(in crate::bench) unsafe trait Plain: Copy + 'static {}

// SAFETY: a primitive number without padding, of which every pattern is a value.
unsafe impl Plain for u8 {}
// SAFETY: as for `u8`.
unsafe impl Plain for u32 {}
// SAFETY: as for `u8`.
unsafe impl Plain for u64 {}
// SAFETY: as for `u8`.
unsafe impl Plain for f64 {}

/// The bytes of some values, for reading.
pub(in crate::bench) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a plain type has no padding, so all bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of some values, for writing.
pub(in crate::bench) fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, and whatever is written is a value of a plain type.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Page-aligned memory for some values, touched.
#[derive(Debug)]
pub(super) struct Touched<T> {
    pages: Pages,
    count: usize,
    values: PhantomData<T>,
}

impl<T: Plain> Touched<T> {
    pub(super) fn new(count: usize) -> io::Result<Self> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut pages = Pages::new(bytes)?;
        pages.as_mut_slice().fill(0x5A);
        Ok(Self { pages, count, values: PhantomData })
    }
}

impl<T: Plain> Deref for Touched<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the pages hold `count` values, begin at a page, and any bytes are values.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast(), self.count) }
    }
}

impl<T: Plain> DerefMut for Touched<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_ptr().cast(), self.count) }
    }
}

/// Memory of a kind, for messages.
pub(super) trait Memory: DerefMut<Target = [u8]> + Sized {
    /// Touched memory of a length.
    fn touched(bytes: usize) -> io::Result<Self>;
}

impl Memory for Touched<u8> {
    fn touched(bytes: usize) -> io::Result<Self> {
        Self::new(bytes)
    }
}

/// Mixes all bits of a number (the finaliser of splitmix64), as the C contestant does.
pub(in crate::bench) fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_being_bytes() {
        let mut numbers = Touched::<u32>::new(3).unwrap();
        numbers.copy_from_slice(&[1, 2, 0x0403_0201]);
        assert_eq!(bytes_of(&numbers).len(), 12);
        bytes_of_mut(&mut numbers)[..4].fill(0xFF);
        assert_eq!(*numbers, [u32::MAX, 2, 0x0403_0201]);
    }

    #[test]
    fn memory_may_be_empty() {
        assert!(Touched::<u8>::new(0).unwrap().is_empty());
        assert!(Touched::<u64>::new(usize::MAX).is_err());
    }
}
