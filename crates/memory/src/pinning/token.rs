//! What a pinner tells about a pin.

use std::sync::Arc;

use memferry_sys::pages::page_bytes;

/// A pinner's identifier of a pin, a slot of a table or a key of a device, and the addresses that a
/// device has for the pinned pages. The number is meaningful only to the pinner that returned it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PinToken {
    number: u64,
    /// The IOVA of each page. `None` if the engine uses the addresses of the process.
    pages: Option<Arc<[u64]>>,
}

/// Memory that is contiguous for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaSegment {
    /// First IOVA.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl PinToken {
    /// A token without addresses of a device.
    pub fn new(number: u64) -> Self {
        Self { number, pages: None }
    }

    /// A token with the IOVA of each page.
    pub fn mapped(number: u64, pages: Arc<[u64]>) -> Self {
        Self { number, pages: Some(pages) }
    }

    /// The number that the pinner gave the pin.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The IOVA of the byte at `offset` of the pin, and how many bytes from there on are contiguous
    /// for the device, at most `max_bytes`. `None` if the pin is shorter, or has no such addresses.
    #[inline]
    pub fn segment(&self, offset: u64, max_bytes: u64) -> Option<DmaSegment> {
        let page = page_bytes() as u64;
        // A page is a power of two; the compiler does not know, and would divide.
        let (first, offset_in_page) = (offset >> page.trailing_zeros(), offset & (page - 1));
        let first = usize::try_from(first).ok()?;
        let (start, rest) = self.pages.as_ref()?.get(first..)?.split_first()?;
        let mut bytes = page - offset_in_page;
        for next in rest {
            if bytes >= max_bytes || *next != start + offset_in_page + bytes {
                break;
            }
            bytes += page;
        }
        Some(DmaSegment { address: start + offset_in_page, bytes: bytes.min(max_bytes) })
    }

    /// The IOVA of `bytes` bytes from `offset` of the pin on. `None` if the pin is shorter, has no such
    /// addresses, or the bytes are not contiguous for the device.
    #[inline]
    pub fn contiguous(&self, offset: u64, bytes: u64) -> Option<u64> {
        let page = page_bytes() as u64;
        let offset_in_page = offset & (page - 1);
        if offset_in_page.checked_add(bytes)? <= page {
            let first = usize::try_from(offset >> page.trailing_zeros()).ok()?;
            return Some(self.pages.as_ref()?.get(first)? + offset_in_page);
        }
        let segment = self.segment(offset, bytes)?;
        (segment.bytes == bytes).then_some(segment.address)
    }
}
