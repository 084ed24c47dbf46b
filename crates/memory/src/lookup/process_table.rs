//! The processes whose memory is translated: numbers are reused, generations are not.

use std::collections::VecDeque;

use super::error::{LookupError, TooManyProcesses};
use super::line_map::LineMap;
use crate::handle::ProcessHandle;

/// All processes, by number.
#[derive(Debug, Default)]
pub(crate) struct ProcessTable {
    entries: Vec<ProcessEntry>,
    free: VecDeque<u16>,
}

#[derive(Debug)]
struct ProcessEntry {
    generation: u32,
    state: ProcessState,
    /// The attached lines of the process, by address.
    lines: LineMap,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessState {
    Free,
    Live,
    /// Being removed: its lines are being detached, and none is attached any more.
    Removing,
}

/// The result of an attempt to remove a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RemovalStatus {
    /// The caller removes it.
    Started,
    /// Another thread is removing it.
    InProgress,
    /// The process does not exist.
    NotFound,
}

impl ProcessTable {
    pub(crate) fn add(&mut self) -> Result<ProcessHandle, TooManyProcesses> {
        let number = match self.free.pop_front() {
            Some(number) => number,
            None => {
                let number = u16::try_from(self.entries.len()).map_err(|_| TooManyProcesses)?;
                let lines = LineMap::default();
                self.entries.push(ProcessEntry { generation: 0, state: ProcessState::Free, lines });
                number
            }
        };
        let entry = &mut self.entries[usize::from(number)];
        entry.state = ProcessState::Live;
        // A number that has used up its generations is not free (see `end_removal`).
        entry.generation += 1;
        ProcessHandle::new(number, entry.generation).map_err(|_| TooManyProcesses)
    }

    fn entry(&self, process: ProcessHandle) -> Option<&ProcessEntry> {
        let entry = self.entries.get(usize::from(process.number()))?;
        (entry.generation == process.generation() && entry.state != ProcessState::Free)
            .then_some(entry)
    }

    fn entry_mut(&mut self, process: ProcessHandle) -> Option<&mut ProcessEntry> {
        let entry = self.entries.get_mut(usize::from(process.number()))?;
        (entry.generation == process.generation() && entry.state != ProcessState::Free)
            .then_some(entry)
    }

    /// Checks that the handle names a process that exists and is not being removed.
    pub(crate) fn check(&self, process: ProcessHandle) -> Result<(), LookupError> {
        match self.entry(process) {
            Some(ProcessEntry { state: ProcessState::Live, .. }) => Ok(()),
            _ => Err(LookupError::Stale(process)),
        }
    }

    /// The lines of a process, also while it is being removed.
    pub(crate) fn lines(&self, process: ProcessHandle) -> Option<&LineMap> {
        self.entry(process).map(|entry| &entry.lines)
    }

    pub(crate) fn lines_mut(&mut self, process: ProcessHandle) -> Option<&mut LineMap> {
        self.entry_mut(process).map(|entry| &mut entry.lines)
    }

    pub(crate) fn begin_removal(&mut self, process: ProcessHandle) -> RemovalStatus {
        match self.entry_mut(process) {
            None => RemovalStatus::NotFound,
            Some(ProcessEntry { state: ProcessState::Removing, .. }) => RemovalStatus::InProgress,
            Some(entry) => {
                entry.state = ProcessState::Removing;
                RemovalStatus::Started
            }
        }
    }

    /// Frees the number. All lines must be detached.
    pub(crate) fn end_removal(&mut self, process: ProcessHandle) {
        let Some(entry) = self.entry_mut(process) else { return };
        assert!(entry.lines.is_empty(), "{process:?} still has lines");
        entry.state = ProcessState::Free;
        if entry.generation < u32::MAX {
            self.free.push_back(process.number());
        }
    }

    /// All processes, including those being removed.
    pub(crate) fn all(&self) -> impl Iterator<Item = ProcessHandle> {
        self.entries.iter().enumerate().filter_map(|(number, entry)| {
            let handle = ProcessHandle::new(u16::try_from(number).ok()?, entry.generation).ok()?;
            (entry.state != ProcessState::Free).then_some(handle)
        })
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.entries.len() * size_of::<ProcessEntry>() + self.free.len() * size_of::<u16>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_used_again_has_another_generation() {
        let mut processes = ProcessTable::default();
        let first = processes.add().unwrap();
        assert_eq!(processes.begin_removal(first), RemovalStatus::Started);
        assert_eq!(processes.begin_removal(first), RemovalStatus::InProgress);
        assert_eq!(processes.check(first), Err(LookupError::Stale(first)));
        processes.end_removal(first);
        assert_eq!(processes.begin_removal(first), RemovalStatus::NotFound);
        let second = processes.add().unwrap();
        assert_eq!(second.number(), first.number());
        assert_ne!(second.generation(), first.generation());
        assert_eq!(processes.check(first), Err(LookupError::Stale(first)));
        assert_eq!(processes.check(second), Ok(()));
    }

    #[test]
    fn there_are_as_many_processes_as_numbers() {
        let mut processes = ProcessTable::default();
        for _ in 0..=u16::MAX {
            processes.add().unwrap();
        }
        assert_eq!(processes.add(), Err(TooManyProcesses));
    }

    #[test]
    fn a_number_without_generations_left_is_not_used_again() {
        let mut processes = ProcessTable::default();
        processes.add().unwrap();
        processes.entries[0].generation = u32::MAX;
        let last = ProcessHandle::new(0, u32::MAX).unwrap();
        processes.begin_removal(last);
        processes.end_removal(last);
        assert_eq!(processes.add().unwrap().number(), 1);
    }
}
