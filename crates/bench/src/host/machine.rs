//! The machine on which a measurement was made, as far as it explains the numbers. It is read once
//! per run from the processor, `/proc` and the scheduler, and is part of every outcome.

use std::fs;

use memferry_sys::copy::stream::Streaming;
use memferry_sys::{affinity, cpu};
use serde::{Deserialize, Serialize};

use crate::results::size;

/// Properties of the machine that its numbers depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The model name that the processor reports.
    pub cpu: String,
    /// The number of cores that this process may use.
    pub cores: usize,
    /// The size of the first-level data cache of one core.
    pub l1_bytes: u64,
    /// The size of the second-level cache of one core.
    pub l2_bytes: u64,
    /// The size of the last-level cache.
    pub l3_bytes: u64,
    /// The total memory of the machine in bytes; 0 if it is unknown.
    pub memory_bytes: u64,
    /// The release of the running kernel.
    pub kernel: String,
    /// The kernels with non-temporal stores that this processor supports, the presumably fastest
    /// first.
    pub streaming: Vec<String>,
}

impl Machine {
    /// Reads the properties of this machine.
    pub fn detect() -> Self {
        let facts = cpu::info();
        Self {
            cpu: facts.model.clone(),
            cores: affinity::allowed_cores().len(),
            l1_bytes: facts.l1_bytes as u64,
            l2_bytes: facts.l2_bytes as u64,
            l3_bytes: facts.l3_bytes as u64,
            memory_bytes: memory_bytes("MemTotal").unwrap_or(0),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned()),
            streaming: Streaming::supported().map(|kernel| kernel.name().to_owned()).collect(),
        }
    }

    /// The properties as name and text, in the order of display.
    pub fn info(&self) -> [(&'static str, String); 6] {
        let caches = [self.l1_bytes, self.l2_bytes, self.l3_bytes].map(size::format).join(" / ");
        [
            ("processor", self.cpu.clone()),
            ("cores", self.cores.to_string()),
            ("caches L1 / L2 / L3", caches),
            ("memory", size::format(self.memory_bytes)),
            ("kernel", self.kernel.clone()),
            ("streaming stores", self.streaming.join(", ")),
        ]
    }
}

/// The value of one field of `/proc/meminfo`, in bytes.
pub fn memory_bytes(field: &str) -> Option<u64> {
    meminfo_field(&fs::read_to_string("/proc/meminfo").ok()?, field)
}

fn meminfo_field(meminfo: &str, field: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_of_meminfo_is_read_in_bytes() {
        let text = "MemTotal:        8000 kB\nMemFree:          12 kB\nHugePages_Total:   0\n";
        assert_eq!(meminfo_field(text, "MemTotal"), Some(8000 << 10));
        assert_eq!(meminfo_field(text, "MemFree"), Some(12 << 10));
        assert_eq!(meminfo_field(text, "Mem"), None);
        assert_eq!(meminfo_field(text, "HugePages_Total"), None);
    }

    #[test]
    fn this_machine_has_a_processor_and_a_way_to_copy() {
        let machine = Machine::detect();
        assert!(!machine.cpu.is_empty());
        assert!(machine.cores >= 1);
        assert!(machine.streaming.iter().any(|name| name == "plain"));
    }
}
