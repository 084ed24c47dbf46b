//! Resources of a process, and those that processes leave behind.

use std::path::PathBuf;

/// Descriptors and shared mappings of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceUsage {
    /// Open descriptors.
    pub descriptors: usize,
    /// Shared mappings.
    pub mappings: usize,
}

/// The resources of this process now.
pub fn resource_usage() -> ResourceUsage {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mappings = maps.lines().filter(|line| line.contains("memfd:memferry")).count();
    // One of them is the directory that is being read.
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count() - 1;
    ResourceUsage { descriptors, mappings }
}

/// Shared memory with a name, which outlives processes. There should be none, except that of other
/// libraries in benches, which may run at the same time.
pub fn named_memory() -> Vec<String> {
    let Ok(folder) = std::fs::read_dir("/dev/shm") else { return Vec::new() };
    let names = folder.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_of_benches =
        |name: &str| name.starts_with("memferry-bench-") || name.starts_with("memferry-test-");
    names.filter(|name| name.contains("memferry") && !is_of_benches(name)).collect()
}

/// A size of a process in KiB, by its name in `/proc/PID/status`.
pub fn memory_kib(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A directory of a test, removed with its content.
pub struct Folder(PathBuf);

impl Folder {
    /// Creates a directory.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(super::unique(name));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// Its path.
    pub fn path(&self) -> &std::path::Path {
        &self.0
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> String {
        self.0.join(name).into_os_string().into_string().unwrap()
    }

    /// The names of its files.
    pub fn contents(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
