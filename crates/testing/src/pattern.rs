//! Byte patterns.

use std::sync::OnceLock;

/// Mixes the bits of a number.
pub fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// Patterns are cut from a table, block by block, so that a check costs hardly more than a read.
const BLOCK: usize = 64 << 10;

fn table() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| (0..BLOCK as u64 / 4).flat_map(|n| mix(n).to_le_bytes()).collect())
}

/// The bytes of a block.
fn block(seed: u64, index: usize) -> &'static [u8] {
    let start = mix(seed.wrapping_add(index as u64)) as usize % BLOCK;
    &table()[start..start + BLOCK]
}

/// Fills memory with the pattern of a seed.
pub fn fill(memory: &mut [u8], seed: u64) {
    let seed = mix(seed);
    for (index, bytes) in memory.chunks_mut(BLOCK).enumerate() {
        bytes.copy_from_slice(&block(seed, index)[..bytes.len()]);
    }
}

/// The first offset at which memory does not hold the pattern of a seed.
pub fn first_wrong(memory: &[u8], seed: u64) -> Option<usize> {
    let seed = mix(seed);
    memory.chunks(BLOCK).enumerate().find_map(|(index, bytes)| {
        let expected = &block(seed, index)[..bytes.len()];
        let offset = || bytes.iter().zip(expected).position(|(found, meant)| found != meant);
        if bytes == expected { None } else { offset().map(|offset| index * BLOCK + offset) }
    })
}

/// The pattern of a seed.
pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fill(&mut bytes, seed);
    bytes
}
