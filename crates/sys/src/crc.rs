//! CRC-32C (Castagnoli), the checksum of iSCSI, ext4 and Intel's accelerators: initial value and
//! result are inverted, so the CRC of nothing is 0, and that of `123456789` is 0xE3069283.
//!
//! The processor's instructions compute it, where it has them. CRCs are linear: that of two ranges
//! in a row is the CRC of the first, [shifted](shift) by the length of the second, XOR the CRC of the
//! second. So ranges are computed in any order, by anybody.

/// The CRC of the bytes that `crc` is the CRC of, followed by a range.
///
/// # Safety
/// `source` must be valid for reads of `length` bytes, which nothing writes during the call.
#[inline]
pub unsafe fn append(crc: u32, source: *const u8, length: usize) -> u32 {
    // SAFETY: the caller guarantees what this needs.
    crc32c::crc32c_append(crc, unsafe { std::slice::from_raw_parts(source, length) })
}

/// The polynomial without its highest term, with the lowest power in the highest bit.
const POLYNOMIAL: u32 = 0x82F6_3B78;
/// The polynomial 1, in the same order.
const ONE: u32 = 1 << 31;

/// Multiplies two polynomials modulo the CRC's. Without branches, which would all be mispredicted.
const fn multiply(a: u32, b: u32) -> u32 {
    let (mut product, mut power, mut bit) = (0, b, 32);
    // The powers of `a` from the lowest on: its highest bit first.
    while bit > 0 {
        bit -= 1;
        product ^= power & (a >> bit & 1).wrapping_neg();
        power = power >> 1 ^ POLYNOMIAL & (power & 1).wrapping_neg();
    }
    product
}

/// At index `n`, x to the power of 8 · 2^n: what the CRC is multiplied with for 2^n more bytes.
static SHIFTS: [u32; 64] = {
    let mut shifts = [0; 64];
    // x^8: one byte.
    shifts[0] = ONE >> 8;
    let mut n = 1;
    while n < 64 {
        shifts[n] = multiply(shifts[n - 1], shifts[n - 1]);
        n += 1;
    }
    shifts
};

/// What a CRC contributes to that of a longer range, in which `bytes` more follow: the CRC of the
/// whole is this XOR the CRC of these bytes.
pub fn shift(crc: u32, bytes: u64) -> u32 {
    let (mut crc, mut left) = (crc, bytes);
    while left != 0 && crc != 0 {
        crc = multiply(SHIFTS[left.trailing_zeros() as usize], crc);
        left &= left - 1;
    }
    crc
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, bit by bit.
    fn bitwise(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                if crc & 1 != 0 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 }
            })
        })
    }

    fn crc(bytes: &[u8]) -> u32 {
        // SAFETY: the slice is borrowed.
        unsafe { append(0, bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn the_check_value_of_the_standard_comes_out() {
        assert_eq!(bitwise(b"123456789"), 0xE306_9283);
        assert_eq!(crc(b"123456789"), 0xE306_9283);
        assert_eq!(crc(b""), 0);
        // Test vectors of RFC 3720, appendix B.4.
        assert_eq!(crc(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc(&[0xFF; 32]), 0x62A8_AB43);
    }

    #[test]
    fn a_shift_by_nothing_changes_nothing_and_long_shifts_add_up() {
        assert_eq!(shift(0x1234_5678, 0), 0x1234_5678);
        assert_eq!(shift(0, u64::MAX), 0);
        let twice = shift(shift(0x1234_5678, (1 << 40) + 5), 1 << 33);
        assert_eq!(twice, shift(0x1234_5678, (1 << 40) + (1 << 33) + 5));
    }

    proptest! {
        #[test]
        fn the_crc_is_the_one_of_the_definition(
            bytes in prop::collection::vec(any::<u8>(), 0..3000), skipped in 0usize..16,
        ) {
            let bytes = &bytes[skipped.min(bytes.len())..];
            prop_assert_eq!(crc(bytes), bitwise(bytes));
        }

        #[test]
        fn the_crcs_of_two_parts_make_that_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 0..3000), cut in any::<prop::sample::Index>(),
        ) {
            let (first, second) = bytes.split_at(cut.index(bytes.len() + 1));
            let combined = shift(crc(first), second.len() as u64) ^ crc(second);
            prop_assert_eq!(combined, bitwise(&bytes));
        }
    }
}
