//! The machine a measurement was made on, as far as it explains the numbers. It is read once per
//! run from the processor, `/proc` and the scheduler, and travels inside every outcome.

use std::fs;

use memferry_sys::copy::stream::Streaming;
use memferry_sys::{affinity, cpu};
use serde::Serialize;

use crate::size;

/// Facts of the machine that its numbers depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Machine {
    /// The name the processor gives itself.
    pub(crate) cpu: String,
    /// How many cores this process may use.
    pub(crate) cores: usize,
    /// First-level data cache of one core.
    pub(crate) l1_bytes: u64,
    /// Second-level cache of one core.
    pub(crate) l2_bytes: u64,
    /// Last-level cache.
    pub(crate) l3_bytes: u64,
    /// All memory of the machine, 0 when it cannot be told.
    pub(crate) memory_bytes: u64,
    /// The running kernel's release.
    pub(crate) kernel: String,
    /// The streaming kernels this processor can run, best guess first.
    pub(crate) streaming: Vec<String>,
}

impl Machine {
    /// Looks at the machine the program runs on.
    pub(crate) fn look() -> Self {
        let facts = cpu::facts();
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

    /// The facts as name and text, in the order people ask for them.
    pub(crate) fn facts(&self) -> [(&'static str, String); 6] {
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

/// One line of `/proc/meminfo`, in bytes.
pub(crate) fn memory_bytes(field: &str) -> Option<u64> {
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
        let machine = Machine::look();
        assert!(!machine.cpu.is_empty());
        assert!(machine.cores >= 1);
        assert!(machine.streaming.iter().any(|name| name == "plain"));
    }
}
