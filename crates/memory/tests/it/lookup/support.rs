//! A backend that tracks what is attached and asserts that its calls are valid.

use std::collections::HashSet;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use memferry_memory::handle::{ProcessAddress, ProcessHandle};
use memferry_memory::lookup::{
    AttachError, Geometry, LineKey, Lookup, LookupConfig, TranslationBackend,
};

/// The page size in bytes.
pub(crate) fn page_bytes() -> u64 {
    memferry_sys::pages::page_bytes() as u64
}

/// The address of a page of a process.
pub(crate) fn page(process: ProcessHandle, page: u64) -> ProcessAddress {
    ProcessAddress { process, address: page * page_bytes() }
}

/// The entry that the backend writes for a page: different for every page of every process.
pub(crate) fn truth(process: ProcessHandle, address: u64) -> u64 {
    let page = address / page_bytes();
    u64::from(process.generation()) << 48 | u64::from(process.number()) << 32 | (page + 1)
}

/// A backend for tests. Its clones share their state.
#[derive(Debug, Clone, Default)]
pub(crate) struct Truth {
    state: Arc<Mutex<TruthState>>,
}

#[derive(Debug, Default)]
struct TruthState {
    attached: HashSet<LineKey>,
    refusing: HashSet<u64>,
    attaches: u64,
}

impl Truth {
    /// Whether a line is attached now.
    pub(crate) fn is_attached(&self, line: LineKey) -> bool {
        self.state.lock().unwrap().attached.contains(&line)
    }

    /// The number of attached lines.
    pub(crate) fn attached(&self) -> usize {
        self.state.lock().unwrap().attached.len()
    }

    /// The number of attach calls that succeeded.
    pub(crate) fn attaches(&self) -> u64 {
        self.state.lock().unwrap().attaches
    }

    /// Makes attach fail for lines at this address, or succeed again.
    pub(crate) fn refuse(&self, address: u64, refuse: bool) {
        let mut state = self.state.lock().unwrap();
        if refuse {
            state.refusing.insert(address)
        } else {
            state.refusing.remove(&address)
        };
    }
}

impl TranslationBackend for Truth {
    fn attach(&self, line: LineKey, entries: &mut [u64]) -> Result<(), AttachError> {
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

    fn detach(&self, line: LineKey, entries: &[u64]) {
        assert!(self.state.lock().unwrap().attached.remove(&line), "{line:?} was not attached");
        for (page, entry) in (0..).zip(entries) {
            assert_eq!(*entry, truth(line.process, line.address + page * page_bytes()));
        }
    }
}

/// A cache with this geometry.
pub(crate) fn config(entries: usize, line_entries: usize, ways: usize) -> LookupConfig {
    LookupConfig::cached(Geometry::new(entries, line_entries, ways).unwrap())
}

/// Creates a lookup over a new backend.
pub(crate) fn lookup(config: LookupConfig) -> (Lookup<Truth>, Truth) {
    let backend = Truth::default();
    (Lookup::new(config, backend.clone()).unwrap(), backend)
}

/// A writer whose contents the test can read afterwards.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

impl SharedBuffer {
    /// What was written so far.
    pub(crate) fn contents(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl Write for SharedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
