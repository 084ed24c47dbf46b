//! The CRC-32C of the model, computed byte by byte: independent of what the library uses.
//!
//! The device inverts the seed before the first byte and the result after the last, unless flags
//! bypass the inversion, which the driver does not set. So a seed of 0 gives the CRC of iSCSI, and
//! the CRC of some bytes is the seed for those that follow. This is the convention that SPDK relies
//! on: its library (`lib/idxd/idxd.c`) inverts the value of the record to get what its software
//! path (`spdk_crc32c_update` with the inverted seed, which inverts no result) computes for the
//! same seed.

const fn table() -> [u32; 256] {
    const REFLECTED_POLYNOMIAL: u32 = 0x82F6_3B78;
    let (mut table, mut byte) = ([0; 256], 0);
    while byte < 256 {
        let (mut value, mut bit) = (byte as u32, 0);
        while bit < 8 {
            value = if value & 1 != 0 { value >> 1 ^ REFLECTED_POLYNOMIAL } else { value >> 1 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
}

static TABLE: [u32; 256] = table();

/// The CRC of the bytes that `seed` is the CRC of, followed by `bytes`.
pub(crate) fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!seed, |crc, byte| crc >> 8 ^ TABLE[usize::from((crc as u8) ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_the_standard_comes_out() {
        assert_eq!(crc32c(0, b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(crc32c(0, b"1234"), b"56789"), 0xE306_9283);
        assert_eq!(crc32c(0, b""), 0);
    }
}
