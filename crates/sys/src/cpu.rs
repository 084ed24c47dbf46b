//! Processor information: model, vector extensions, cache sizes.

use std::fs;

use crate::fork::ForkSafe;
use crate::settings::size;

/// What the copy kernels need to know about the processor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuInfo {
    /// The model name.
    pub model: String,
    /// 64-byte direct stores.
    pub movdir64b: bool,
    /// Submission of 64 bytes to the shared queue of a device.
    pub enqcmd: bool,
    /// Waiting for a write to memory without an interrupt (UMWAIT, TPAUSE).
    pub waitpkg: bool,
    /// 512-bit vectors.
    pub avx512: bool,
    /// 256-bit vectors.
    pub avx2: bool,
    /// Size of the L1 data cache of one core, in bytes.
    pub l1_bytes: usize,
    /// Size of the L2 cache of one core, in bytes.
    pub l2_bytes: usize,
    /// Size of the last-level cache, in bytes.
    pub l3_bytes: usize,
}

/// The processor information, read once.
pub fn info() -> &'static CpuInfo {
    static INFO: ForkSafe<CpuInfo> = ForkSafe::new();
    INFO.get_or_init(|| CpuInfo {
        model: model(),
        movdir64b: has_leaf_7_bit(28),
        enqcmd: has_leaf_7_bit(29),
        waitpkg: has_leaf_7_bit(5),
        avx512: has_avx512(),
        avx2: has_avx2(),
        l1_bytes: cache_bytes(1).unwrap_or(32 << 10),
        l2_bytes: cache_bytes(2).unwrap_or(1 << 20),
        l3_bytes: cache_bytes(3).or_else(|| cache_bytes(2)).unwrap_or(8 << 20),
    })
}

fn model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// Whether a bit of leaf 7, register ecx, is set.
#[cfg(target_arch = "x86_64")]
fn has_leaf_7_bit(bit: u32) -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // SAFETY: every x86-64 processor has cpuid, and leaf 7 is read only where it exists.
    #[allow(unused_unsafe)]
    unsafe {
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & (1 << bit) != 0
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_leaf_7_bit(_bit: u32) -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

/// The size in bytes of the data or unified cache of a level, from sysfs.
fn cache_bytes(level: u32) -> Option<usize> {
    (0..8).find_map(|index| {
        let read = |name: &str| {
            fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}"))
        };
        let found = read("level").ok()?.trim().parse::<u32>().ok()?;
        if found != level || read("type").ok()?.trim() == "Instruction" {
            return None;
        }
        parse_size(read("size").ok()?.trim())
    })
}

fn parse_size(text: &str) -> Option<usize> {
    usize::try_from(size::parse(text).ok()?).ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_unit() {
        assert_eq!(parse_size("48K"), Some(48 << 10));
        assert_eq!(parse_size("2M"), Some(2 << 20));
        assert_eq!(parse_size("17"), Some(17));
        assert_eq!(parse_size("many"), None);
    }

    #[test]
    fn the_facts_are_plausible() {
        let cpu = info();
        assert!(cpu.l1_bytes >= 4 << 10 && cpu.l1_bytes <= cpu.l3_bytes);
        assert!(!cpu.model.is_empty());
    }
}
