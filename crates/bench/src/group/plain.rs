//! Conversion of numbers to bytes, and page-aligned memory for numbers.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use memferry::sys::pages::Pages;

/// Types that consist only of their bytes.
///
/// # Safety
///
/// Every bit pattern is a value, there is no padding, and the alignment is at most a page.
pub(crate) unsafe trait Plain: Copy + 'static {}

// SAFETY: a primitive number without padding, of which every bit pattern is a value.
unsafe impl Plain for u8 {}
// SAFETY: as for `u8`.
unsafe impl Plain for u32 {}
// SAFETY: as for `u8`.
unsafe impl Plain for u64 {}
// SAFETY: as for `u8`.
unsafe impl Plain for f64 {}

/// Bytes of values, for reading.
pub(crate) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a plain type has no padding, so all bytes are initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Bytes of values, for writing.
pub(crate) fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, and any bytes written are a value of a plain type.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Page-aligned, resident memory for values.
#[derive(Debug)]
pub(crate) struct TouchedPages<T> {
    pages: Pages,
    count: usize,
    values: PhantomData<T>,
}

impl<T: Plain> TouchedPages<T> {
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut pages = Pages::new(bytes)?;
        pages.as_mut_slice().fill(0x5A);
        Ok(Self { pages, count, values: PhantomData })
    }
}

impl<T: Plain> Deref for TouchedPages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the pages hold `count` values, start on a page boundary, and any bytes are
        // values.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast(), self.count) }
    }
}

impl<T: Plain> DerefMut for TouchedPages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_ptr().cast(), self.count) }
    }
}

/// A kind of memory for messages.
pub(crate) trait Memory: DerefMut<Target = [u8]> + Sized {
    /// Allocates memory of a length and touches every page.
    fn touched(bytes: usize) -> io::Result<Self>;
}

impl Memory for TouchedPages<u8> {
    fn touched(bytes: usize) -> io::Result<Self> {
        Self::new(bytes)
    }
}

/// Mixes all bits of a number (the finaliser of splitmix64), as the C candidate does.
pub(crate) fn splitmix64(value: u64) -> u64 {
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
        let mut numbers = TouchedPages::<u32>::new(3).unwrap();
        numbers.copy_from_slice(&[1, 2, 0x0403_0201]);
        assert_eq!(bytes_of(&numbers).len(), 12);
        bytes_of_mut(&mut numbers)[..4].fill(0xFF);
        assert_eq!(*numbers, [u32::MAX, 2, 0x0403_0201]);
    }

    #[test]
    fn memory_may_be_empty() {
        assert!(TouchedPages::<u8>::new(0).unwrap().is_empty());
        assert!(TouchedPages::<u64>::new(usize::MAX).is_err());
    }
}
