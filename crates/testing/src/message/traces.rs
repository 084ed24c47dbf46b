//! Resources of a process, and those that processes leave behind.

use std::path::PathBuf;

use memferry_sys::stats::PAGE_NAME;

/// Descriptors and shared mappings of this process, without those of its page of counters, which stays open for as
/// long as the process lives.
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
    let is_page = |text: &str| text.contains(PAGE_NAME);
    let (pages, mappings): (Vec<_>, Vec<_>) =
        maps.lines().filter(|line| line.contains("memfd:memferry")).partition(|line| is_page(line));
    let links = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| {
        let target = std::fs::read_link(entry.unwrap().path()).unwrap_or_default();
        target.to_string_lossy().into_owned()
    });
    let (page_links, links): (Vec<_>, Vec<_>) = links.partition(|link| is_page(link));
    assert!(pages.len() <= 1 && page_links.len() <= 1, "{pages:?} {page_links:?}");
    // One of them is the directory that is being read.
    ResourceUsage { descriptors: links.len() - 1, mappings: mappings.len() }
}

/// What [`resource_usage`] counts, for the message of a failed test.
pub fn open_objects() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut lines: Vec<String> =
        maps.lines().filter(|line| line.contains("memfd:memferry")).map(Into::into).collect();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        if let Ok(target) = std::fs::read_link(entry.path()) {
            lines.push(format!("{}: {}", entry.file_name().display(), target.display()));
        }
    }
    lines.join("\n")
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
