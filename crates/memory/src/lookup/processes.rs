//! The processes whose memory is looked up: numbers that are used again, generations that are not.

use std::collections::{BTreeMap, VecDeque};

use super::error::{LookupError, TooManyProcesses};
use super::table::Line;
use crate::handle::ProcessHandle;

/// All processes, by number.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    entries: Vec<Entry>,
    free: VecDeque<u16>,
}

#[derive(Debug)]
struct Entry {
    generation: u32,
    stage: Stage,
    /// What is attached of the process, by address.
    lines: BTreeMap<u64, Line>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Free,
    Live,
    /// Being removed: its lines are on their way out, and no new ones come.
    Leaving,
}

/// What the attempt to remove a process met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// The caller removes it.
    Begun,
    /// Another thread is at it.
    UnderWay,
    /// There is no such process.
    Gone,
}

impl Processes {
    pub(crate) fn add(&mut self) -> Result<ProcessHandle, TooManyProcesses> {
        let number = match self.free.pop_front() {
            Some(number) => number,
            None => {
                let number = u16::try_from(self.entries.len()).map_err(|_| TooManyProcesses)?;
                let lines = BTreeMap::new();
                self.entries.push(Entry { generation: 0, stage: Stage::Free, lines });
                number
            }
        };
        let entry = &mut self.entries[usize::from(number)];
        entry.stage = Stage::Live;
        // A number whose generations are used up is not free any more (see `end_removal`).
        entry.generation += 1;
        ProcessHandle::new(number, entry.generation).map_err(|_| TooManyProcesses)
    }

    fn entry(&self, process: ProcessHandle) -> Option<&Entry> {
        let entry = self.entries.get(usize::from(process.number()))?;
        (entry.generation == process.generation() && entry.stage != Stage::Free).then_some(entry)
    }

    fn entry_mut(&mut self, process: ProcessHandle) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(usize::from(process.number()))?;
        (entry.generation == process.generation() && entry.stage != Stage::Free).then_some(entry)
    }

    /// Whether the handle names a process that is there to stay.
    pub(crate) fn check(&self, process: ProcessHandle) -> Result<(), LookupError> {
        match self.entry(process) {
            Some(Entry { stage: Stage::Live, .. }) => Ok(()),
            _ => Err(LookupError::Stale(process)),
        }
    }

    /// The lines of a process, also while it is being removed.
    pub(crate) fn lines(&self, process: ProcessHandle) -> Option<&BTreeMap<u64, Line>> {
        self.entry(process).map(|entry| &entry.lines)
    }

    pub(crate) fn lines_mut(&mut self, process: ProcessHandle) -> Option<&mut BTreeMap<u64, Line>> {
        self.entry_mut(process).map(|entry| &mut entry.lines)
    }

    pub(crate) fn begin_removal(&mut self, process: ProcessHandle) -> Removal {
        match self.entry_mut(process) {
            None => Removal::Gone,
            Some(Entry { stage: Stage::Leaving, .. }) => Removal::UnderWay,
            Some(entry) => {
                entry.stage = Stage::Leaving;
                Removal::Begun
            }
        }
    }

    /// Frees the number. All lines are gone.
    pub(crate) fn end_removal(&mut self, process: ProcessHandle) {
        let Some(entry) = self.entry_mut(process) else { return };
        assert!(entry.lines.is_empty(), "lines of {process:?} are left");
        entry.stage = Stage::Free;
        if entry.generation < u32::MAX {
            self.free.push_back(process.number());
        }
    }

    /// Every process that is there, live or leaving.
    pub(crate) fn all(&self) -> impl Iterator<Item = ProcessHandle> {
        self.entries.iter().enumerate().filter_map(|(number, entry)| {
            let handle = ProcessHandle::new(u16::try_from(number).ok()?, entry.generation).ok()?;
            (entry.stage != Stage::Free).then_some(handle)
        })
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.entries.len() * size_of::<Entry>() + self.free.len() * size_of::<u16>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_used_again_has_another_generation() {
        let mut processes = Processes::default();
        let first = processes.add().unwrap();
        assert_eq!(processes.begin_removal(first), Removal::Begun);
        assert_eq!(processes.begin_removal(first), Removal::UnderWay);
        assert_eq!(processes.check(first), Err(LookupError::Stale(first)));
        processes.end_removal(first);
        assert_eq!(processes.begin_removal(first), Removal::Gone);
        let second = processes.add().unwrap();
        assert_eq!(second.number(), first.number());
        assert_ne!(second.generation(), first.generation());
        assert_eq!(processes.check(first), Err(LookupError::Stale(first)));
        assert_eq!(processes.check(second), Ok(()));
    }

    #[test]
    fn there_are_as_many_processes_as_numbers() {
        let mut processes = Processes::default();
        for _ in 0..=u16::MAX {
            processes.add().unwrap();
        }
        assert_eq!(processes.add(), Err(TooManyProcesses));
    }

    #[test]
    fn a_number_without_generations_left_is_not_used_again() {
        let mut processes = Processes::default();
        processes.add().unwrap();
        processes.entries[0].generation = u32::MAX;
        let last = ProcessHandle::new(0, u32::MAX).unwrap();
        processes.begin_removal(last);
        processes.end_removal(last);
        assert_eq!(processes.add().unwrap().number(), 1);
    }
}
