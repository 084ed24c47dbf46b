//! A source that knows what is attached, and complains about everything that must not happen.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use memferry_memory::handle::{ProcessHandle, VirtualMemoryHandle};
use memferry_memory::lookup::{Geometry, LineName, Lookup, Refused, Settings, Source};

/// The size of a page.
pub(crate) fn page_bytes() -> u64 {
    memferry_sys::pages::page_bytes() as u64
}

/// The place of a page in the memory of a process.
pub(crate) fn page(process: ProcessHandle, page: u64) -> VirtualMemoryHandle {
    VirtualMemoryHandle { process, address: page * page_bytes() }
}

/// What a truthful source answers for a page: different for every page of every process.
pub(crate) fn truth(process: ProcessHandle, address: u64) -> u64 {
    let page = address / page_bytes();
    u64::from(process.generation()) << 48 | u64::from(process.number()) << 32 | (page + 1)
}

/// A source for tests. Its clones share what they know.
#[derive(Debug, Clone, Default)]
pub(crate) struct Truth {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    attached: HashSet<LineName>,
    refusing: HashSet<u64>,
    attaches: u64,
}

impl Truth {
    /// Whether a line is attached now.
    pub(crate) fn is_attached(&self, line: LineName) -> bool {
        self.state.lock().unwrap().attached.contains(&line)
    }

    /// How many lines are attached now.
    pub(crate) fn attached(&self) -> usize {
        self.state.lock().unwrap().attached.len()
    }

    /// How often a line was attached.
    pub(crate) fn attaches(&self) -> u64 {
        self.state.lock().unwrap().attaches
    }

    /// Refuses lines at this address, or not any more.
    pub(crate) fn refuse(&self, address: u64, refuse: bool) {
        let mut state = self.state.lock().unwrap();
        if refuse {
            state.refusing.insert(address)
        } else {
            state.refusing.remove(&address)
        };
    }
}

impl Source for Truth {
    fn attach(&self, line: LineName, entries: &mut [u64]) -> Result<(), Refused> {
        let mut state = self.state.lock().unwrap();
        if state.refusing.contains(&line.address) {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        assert!(state.attached.insert(line), "{line:?} attached twice");
        state.attaches += 1;
        for (page, entry) in (0..).zip(entries) {
            *entry = truth(line.process, line.address + page * page_bytes());
        }
        Ok(())
    }

    fn detach(&self, line: LineName, entries: &[u64]) {
        assert!(self.state.lock().unwrap().attached.remove(&line), "{line:?} was not attached");
        for (page, entry) in (0..).zip(entries) {
            assert_eq!(*entry, truth(line.process, line.address + page * page_bytes()));
        }
    }
}

/// A cache of so many entries, line entries and ways.
pub(crate) fn settings(entries: usize, line_entries: usize, ways: usize) -> Settings {
    Settings::dynamic(Geometry::new(entries, line_entries, ways).unwrap())
}

/// A lookup over a truthful source.
pub(crate) fn lookup(settings: Settings) -> (Lookup<Truth>, Truth) {
    let source = Truth::default();
    (Lookup::new(settings, source.clone()).unwrap(), source)
}
