//! What a descriptor does, and by which inner loop a processor does it.

use memferry_sys::copy::stream::Streaming;

/// The operation of a descriptor.
///
/// ```
/// use memferry::engine::Opcode;
/// use memferry::plan::CopyQuery;
///
/// assert_eq!(CopyQuery::copy(4096, true).operation, Opcode::Copy);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// Copy between ranges that do not overlap.
    Copy,
    /// Copy between ranges that may overlap, with memmove's result.
    Move,
    /// Set every byte of the target to a value.
    Fill,
    /// Find the first byte in which source and target differ.
    Compare,
    /// Compute the CRC-32C of the source. There is no target.
    Crc,
    /// Copy between ranges that do not overlap, and compute the CRC-32C of the source.
    CopyCrc,
    /// Copy one source to two targets; none of the three ranges overlaps another.
    Dualcast,
}

impl Opcode {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Move => "move",
            Self::Fill => "fill",
            Self::Compare => "compare",
            Self::Crc => "CRC",
            Self::CopyCrc => "copy with CRC",
            Self::Dualcast => "dualcast",
        }
    }

    /// Whether the operation computes a CRC.
    pub const fn has_crc(self) -> bool {
        matches!(self, Self::Crc | Self::CopyCrc)
    }

    /// Whether a descriptor reports a value at its end: that of a compare or a CRC.
    pub const fn has_value(self) -> bool {
        matches!(self, Self::Compare | Self::Crc | Self::CopyCrc)
    }
}

/// The copy loop of a processor. Other engines ignore it.
///
/// ```
/// use memferry::Streaming;
/// use memferry::engine::Kernel;
///
/// assert_eq!(Kernel::Cached.name(), "cached");
/// assert_eq!(Kernel::Stream(Streaming::Avx2).name(), "avx2");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Copies through the caches.
    Cached,
    /// Copies with a loop for data that is larger than the caches. The processor must support the
    /// variant.
    Stream(Streaming),
}

impl Kernel {
    /// The name in plans and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::Stream(variant) => variant.name(),
        }
    }

    /// Whether the kernel leaves the target in no cache.
    pub fn bypasses_caches(self) -> bool {
        matches!(self, Self::Stream(variant) if variant.bypasses_caches())
    }

    /// The kernel of short segments, which are not worth bypassing the caches. Each requests its
    /// successor, if the processor has that loop: it was faster than the C library on every processor
    /// that was tried, with data in the caches and in memory.
    pub fn of_segments() -> Self {
        Self::Stream(Streaming::Prefetch).or_cached()
    }

    /// The kernel itself, or the cached one if this processor does not support it: an unsupported
    /// choice costs speed and never executes an illegal instruction.
    #[inline]
    pub(crate) fn or_cached(self) -> Self {
        match self {
            Self::Stream(variant) if !variant.is_supported() => Self::Cached,
            kernel => kernel,
        }
    }
}
