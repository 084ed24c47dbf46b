//! Copies and fills of data that is larger than the caches: with non-temporal stores, which bypass the
//! caches, or with ordinary ones where these are faster.
//!
//! All variants with non-temporal stores have one structure: align the target to 64 bytes, then process four pages in
//! parallel, so that several DRAM pages are open at once, then copy the tail. They differ in the
//! instruction that moves one cache line. Each ends with a store fence: its writes are ordered
//! before every later store of the calling thread.

use super::ahead::CopyRange;
use crate::cpu;

/// The number of ranges that [`Streaming::copy_together`] copies.
pub const TOGETHER: usize = 4;

/// Variants of the copy loop for data that is larger than the caches.
///
/// ```
/// use memferry::{Ferry, Streaming};
///
/// // The fastest variant that this processor supports; the profile has the measured one.
/// let variant = Streaming::supported().next().unwrap_or(Streaming::Plain);
/// let ferry = Ferry::builder().streaming(variant).build()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Streaming {
    /// 64-byte direct stores (`movdir64b`).
    Movdir64b,
    /// 512-bit non-temporal stores.
    Avx512,
    /// 256-bit non-temporal stores.
    Avx2,
    /// 128-bit non-temporal stores, present on every x86-64.
    Sse2,
    /// Ordinary stores, with the source requested ahead of the loads.
    Prefetch,
    /// Ordinary stores, for processors without the others.
    Plain,
}

impl Streaming {
    /// All variants, from the usually fastest to the slowest.
    pub const ALL: [Self; 6] =
        [Self::Movdir64b, Self::Avx512, Self::Avx2, Self::Sse2, Self::Prefetch, Self::Plain];

    /// What a setting that names a variant may be.
    pub const EXPECTED: &'static str =
        "movdir64b, avx512, avx2, sse2, prefetch or plain, as far as this processor has it";

    /// The name in profiles, settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Movdir64b => "movdir64b",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Sse2 => "sse2",
            Self::Prefetch => "prefetch",
            Self::Plain => "plain",
        }
    }

    /// The variant with a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|variant| variant.name() == name)
    }

    /// Whether this processor supports the variant.
    pub fn is_supported(self) -> bool {
        match self {
            Self::Movdir64b => cpu::info().movdir64b,
            Self::Avx512 => cpu::info().avx512,
            Self::Avx2 => cpu::info().avx2,
            Self::Sse2 => cfg!(target_arch = "x86_64"),
            Self::Prefetch => super::ahead::is_supported(),
            Self::Plain => true,
        }
    }

    /// The variants that this processor supports.
    pub fn supported() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|variant| variant.is_supported())
    }

    /// Whether the variant leaves the target in no cache.
    pub fn bypasses_caches(self) -> bool {
        !matches!(self, Self::Prefetch | Self::Plain)
    }

    /// Copies with the loop of this variant.
    ///
    /// # Safety
    /// The processor must support the variant; `source` must be valid for reads and `target` for
    /// writes of `length` bytes, and the two ranges must not overlap.
    pub unsafe fn copy(self, target: *mut u8, source: *const u8, length: usize) {
        // SAFETY: the caller guarantees the ranges and the support of the processor.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Movdir64b => x86::copy_movdir64b(target, source, length),
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => x86::copy_avx512(target, source, length),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => x86::copy_avx2(target, source, length),
                #[cfg(target_arch = "x86_64")]
                Self::Sse2 => x86::copy_sse2(target, source, length),
                Self::Prefetch => super::ahead::copy(target, source, length),
                _ => super::cached(target, source, length),
            }
        }
    }

    /// Copies short ranges together, a line of each in turn: a page each is open at once, as inside of
    /// one long range.
    ///
    /// # Safety
    /// As for [`Streaming::copy`], for every range; no target may overlap another range.
    pub unsafe fn copy_together(self, ranges: [CopyRange; TOGETHER]) {
        // SAFETY: the caller guarantees the ranges and the support of the processor.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Movdir64b => x86::copy_together_movdir64b(ranges),
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => x86::copy_together_avx512(ranges),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => x86::copy_together_avx2(ranges),
                #[cfg(target_arch = "x86_64")]
                Self::Sse2 => x86::copy_together_sse2(ranges),
                _ => {
                    for CopyRange { source, target, length } in ranges {
                        self.copy(target, source, length);
                    }
                }
            }
        }
    }

    /// Fills with non-temporal stores if the processor has them.
    ///
    /// # Safety
    /// The processor must support the variant, and `target` must be valid for writes of `length`
    /// bytes.
    pub unsafe fn fill(self, target: *mut u8, value: u8, length: usize) {
        // SAFETY: the caller guarantees the range and the support of the processor.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Movdir64b | Self::Avx512 | Self::Avx2 | Self::Sse2 => {
                    x86::fill_sse2(target, value, length);
                }
                _ => super::fill(target, value, length),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_set1_epi8, _mm_sfence, _mm_stream_si128,
        _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
    };

    use super::{CopyRange, TOGETHER};

    const LINE: usize = 64;
    const PAGE: usize = 4096;
    const INTERLEAVED_PAGES: usize = 4;
    const BLOCK: usize = PAGE * INTERLEAVED_PAGES;

    /// Expands to a copy function, and one for ranges together, around a function that moves one line.
    /// Those differ in target features, and a generic function over them would not be compiled with
    /// the features enabled.
    macro_rules! streaming_copy {
        ($(#[$feature:meta])? $name:ident, $together:ident, $move_line:ident) => {
            $(#[$feature])?
            pub(super) unsafe fn $name(mut target: *mut u8, mut source: *const u8, length: usize) {
                // SAFETY: every access below stays inside the `length` bytes that the caller
                // guarantees. `$move_line` gets only 64-byte aligned targets, because the head is
                // copied until `target` is aligned and all steps are multiples of a line.
                unsafe {
                    let head = target.align_offset(LINE).min(length);
                    super::super::cached(target, source, head);
                    target = target.add(head);
                    source = source.add(head);
                    let mut left = length - head;
                    while left >= BLOCK {
                        let mut offset = 0;
                        while offset < PAGE {
                            let mut page = 0;
                            while page < BLOCK {
                                $move_line(target.add(page + offset), source.add(page + offset));
                                page += PAGE;
                            }
                            offset += LINE;
                        }
                        target = target.add(BLOCK);
                        source = source.add(BLOCK);
                        left -= BLOCK;
                    }
                    while left >= LINE {
                        $move_line(target, source);
                        target = target.add(LINE);
                        source = source.add(LINE);
                        left -= LINE;
                    }
                    super::super::cached(target, source, left);
                    _mm_sfence();
                }
            }

            $(#[$feature])?
            pub(super) unsafe fn $together(mut ranges: [CopyRange; TOGETHER]) {
                // SAFETY: every access below stays inside a range that the caller guarantees.
                // `$move_line` gets only 64-byte aligned targets, because each head is copied until
                // the target is aligned and all steps are multiples of a line.
                unsafe {
                    for range in &mut ranges {
                        let head = range.target.align_offset(LINE).min(range.length);
                        super::super::cached(range.target, range.source, head);
                        *range = range.skip(head);
                    }
                    let shortest = ranges.iter().map(|range| range.length).min().unwrap_or(0);
                    let common = shortest - shortest % LINE;
                    let mut offset = 0;
                    while offset < common {
                        for CopyRange { source, target, .. } in &ranges {
                            $move_line(target.add(offset), source.add(offset));
                        }
                        offset += LINE;
                    }
                    for range in ranges {
                        let mut rest = range.skip(common);
                        while rest.length >= LINE {
                            $move_line(rest.target, rest.source);
                            rest = rest.skip(LINE);
                        }
                        super::super::cached(rest.target, rest.source, rest.length);
                    }
                    _mm_sfence();
                }
            }
        };
    }

    /// # Safety
    /// `source` must be valid for reads of 64 bytes; `target` must be valid for writes of 64 bytes
    /// and aligned to 64 bytes.
    #[inline(always)]
    unsafe fn line_movdir64b(target: *mut u8, source: *const u8) {
        // SAFETY: the instruction reads 64 bytes at source and writes 64 at the aligned target.
        unsafe {
            asm!("movdir64b {target}, [{source}]", target = in(reg) target,
                 source = in(reg) source, options(nostack, preserves_flags));
        }
    }

    /// # Safety
    /// As [`line_movdir64b`], on a processor with 512-bit vectors.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn line_avx512(target: *mut u8, source: *const u8) {
        // SAFETY: one 64-byte load and one aligned 64-byte store.
        unsafe {
            let line = _mm512_loadu_si512(source.cast::<__m512i>());
            _mm512_stream_si512(target.cast::<__m512i>(), line);
        }
    }

    /// # Safety
    /// As [`line_movdir64b`], on a processor with 256-bit vectors.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn line_avx2(target: *mut u8, source: *const u8) {
        // SAFETY: two halves of the line, each 32 bytes and aligned, because the line is.
        unsafe {
            let low = _mm256_loadu_si256(source.cast::<__m256i>());
            let high = _mm256_loadu_si256(source.cast::<__m256i>().add(1));
            _mm256_stream_si256(target.cast::<__m256i>(), low);
            _mm256_stream_si256(target.cast::<__m256i>().add(1), high);
        }
    }

    /// # Safety
    /// As [`line_movdir64b`].
    #[inline(always)]
    unsafe fn line_sse2(target: *mut u8, source: *const u8) {
        // SAFETY: four quarters of the line, each 16 bytes and aligned, because the line is.
        unsafe {
            for quarter in 0..4 {
                let part = _mm_loadu_si128(source.cast::<__m128i>().add(quarter));
                _mm_stream_si128(target.cast::<__m128i>().add(quarter), part);
            }
        }
    }

    streaming_copy!(copy_movdir64b, copy_together_movdir64b, line_movdir64b);
    streaming_copy!(
        #[target_feature(enable = "avx512f")]
        copy_avx512,
        copy_together_avx512,
        line_avx512
    );
    streaming_copy!(
        #[target_feature(enable = "avx2")]
        copy_avx2,
        copy_together_avx2,
        line_avx2
    );
    streaming_copy!(copy_sse2, copy_together_sse2, line_sse2);

    /// # Safety
    /// `target` must be valid for writes of `length` bytes.
    pub(super) unsafe fn fill_sse2(target: *mut u8, value: u8, length: usize) {
        const STEP: usize = 16;
        // SAFETY: head, whole steps and tail together cover exactly `length` bytes; the streaming
        // stores get only 16-byte aligned addresses.
        unsafe {
            let head = target.align_offset(STEP).min(length);
            super::super::fill(target, value, head);
            let pattern = _mm_set1_epi8(value.cast_signed());
            let steps = (length - head) / STEP;
            let aligned = target.add(head).cast::<__m128i>();
            for step in 0..steps {
                _mm_stream_si128(aligned.add(step), pattern);
            }
            let done = head + steps * STEP;
            super::super::fill(target.add(done), value, length - done);
            _mm_sfence();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn lengths() -> impl Iterator<Item = usize> {
        (0..200).chain([4095, 4096, 4097, 16_383, 16_384, 16_385, 70_001])
    }

    #[test]
    fn every_variant_copies_exactly_its_range_at_every_alignment() {
        let source: Vec<u8> = (0..80_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
        for variant in Streaming::supported() {
            for length in lengths() {
                for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 61), (63, 64), (7, 33)] {
                    let mut target = vec![0xEE; length + 200];
                    // SAFETY: both ranges lie inside their vectors, which are distinct.
                    unsafe {
                        variant.copy(
                            target.as_mut_ptr().add(to),
                            source.as_ptr().add(from),
                            length,
                        );
                    }
                    assert!(target[to..to + length] == source[from..from + length]);
                    assert!(target[..to].iter().all(|&byte| byte == 0xEE));
                    assert!(target[to + length..].iter().all(|&byte| byte == 0xEE));
                }
            }
        }
    }

    #[test]
    fn ranges_that_are_copied_together_may_differ_in_length_and_alignment() {
        let source: Vec<u8> = (0..80_000u32).map(|i| ((i * 37) >> 3) as u8).collect();
        let sets = [[4096; 4], [0, 1, 63, 64], [65, 4097, 200, 8192], [1460, 1461, 127, 1460]];
        for variant in Streaming::supported() {
            for (lengths, shift) in sets.into_iter().flat_map(|set| [(set, 0), (set, 1), (set, 63)])
            {
                let mut target = vec![0xEE; 4 * 9000];
                let starts = [0, 1, 2, 3].map(|at| at * 9000 + 64 + shift * at);
                let ranges = [0, 1, 2, 3].map(|at| CopyRange {
                    source: source[starts[at] + 7..].as_ptr(),
                    target: target[starts[at]..].as_mut_ptr(),
                    length: lengths[at],
                });
                // SAFETY: the ranges lie inside their vectors, and the starts are further apart than
                // the lengths.
                unsafe { variant.copy_together(ranges) };
                for (start, length) in starts.into_iter().zip(lengths) {
                    let expected = &source[start + 7..start + 7 + length];
                    assert!(target[start..start + length] == *expected, "{variant:?} {lengths:?}");
                    target[start..start + length].fill(0xEE);
                }
                assert!(target.iter().all(|&byte| byte == 0xEE), "{variant:?} {lengths:?}");
            }
        }
    }

    #[test]
    fn every_variant_fills_exactly_its_range() {
        for variant in Streaming::supported() {
            for length in lengths() {
                let mut target = vec![0xEE; length + 70];
                // SAFETY: the range lies inside the vector.
                unsafe { variant.fill(target.as_mut_ptr().add(5), 0x42, length) };
                assert!(target[5..5 + length].iter().all(|&byte| byte == 0x42));
                assert!(target[..5].iter().chain(&target[5 + length..]).all(|&b| b == 0xEE));
            }
        }
    }

    #[test]
    fn names_and_variants_correspond() {
        for variant in Streaming::ALL {
            assert_eq!(Streaming::from_name(variant.name()), Some(variant));
        }
        assert_eq!(Streaming::from_name("warp"), None);
    }
}
