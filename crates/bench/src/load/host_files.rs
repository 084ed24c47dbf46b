//! Files in the page cache to host memory: the loader, against one read, and a mapping that is
//! copied.

use std::cell::RefCell;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};
use memferry::load::{FileSource, Loader};
use memferry::{Buffer, Ferry, MemoryKind};
use memferry_sys::pages::Pages;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::group::splitmix64;
use crate::group::workspace::TempWorkspace;
use crate::harness::{Budget, FnCandidate, Harness, Role, Sample, memcpy};
use crate::results::outcome::Outcome;
use crate::results::series::MEMFERRY;
use crate::results::size;
use crate::{Effort, Progress};

const NEW_MEMORY: &str = "file to new host memory";
const MEMORY_IN_USE: &str = "file to host memory in use";

/// Number of steps of the progress.
pub(super) fn steps(effort: Effort) -> u64 {
    2 * sizes(effort).len() as u64
}

fn sizes(effort: Effort) -> &'static [usize] {
    match effort {
        Effort::Brief => &[64 << 20],
        Effort::Quick => &[1 << 20, 16 << 20, 256 << 20],
        Effort::Full => &[1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30],
    }
}

/// Measures all sizes.
pub(super) fn measure(
    outcome: &mut Outcome,
    workspace: &TempWorkspace,
    effort: Effort,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let loader = Loader::builder().build(Ferry::new()?)?;
    for &bytes in sizes(effort) {
        let file = TestFile::write(workspace.folder(), bytes)?;
        for figure in [NEW_MEMORY, MEMORY_IN_USE] {
            progress.step(&format!("{figure}, {}", size::format(bytes as u64)));
            measure_one(outcome, &loader, &file, figure, effort)?;
        }
    }
    Ok(())
}

fn measure_one(
    outcome: &mut Outcome,
    loader: &Loader,
    file: &TestFile,
    figure: &str,
    effort: Effort,
) -> anyhow::Result<()> {
    let mut in_use = Pages::new(file.bytes)?;
    in_use.as_mut_slice().fill(1);
    let target = RefCell::new(in_use.as_mut_slice());
    let ways: [(&str, Role, Way<'_>); 3] = match figure {
        NEW_MEMORY => [
            (MEMFERRY, Role::Memferry, Box::new(|check| file.load_new(loader, check))),
            ("std::fs::read", Role::Peer, Box::new(|check| file.read_new(check))),
            ("mmap, then copy", Role::Peer, Box::new(|check| file.map_new(check))),
        ],
        _ => [
            (
                MEMFERRY,
                Role::Memferry,
                Box::new(|check| file.load(loader, &mut target.borrow_mut(), check)),
            ),
            ("read", Role::Peer, Box::new(|check| file.read(&mut target.borrow_mut(), check))),
            (
                "mmap, then copy",
                Role::Peer,
                Box::new(|check| file.map(&mut target.borrow_mut(), check)),
            ),
        ],
    };
    let mut candidates = Vec::new();
    for (series, role, mut way) in ways {
        way(Check::Yes).with_context(|| format!("`{series}`"))?;
        candidates.push(FnCandidate::timed(series, role, move |iterations| {
            time(iterations, &mut way).map_err(|error| format!("{error:#}"))
        }));
    }
    let samples = Harness::new(budget(effort)).interleave(&mut candidates);
    samples.require_all()?;
    let bytes = file.bytes as u64;
    outcome.rows.extend(samples.bandwidth_rows(figure, bytes, bytes));
    Ok(())
}

fn budget(effort: Effort) -> Budget {
    let (rounds, slice_ms, total_ms) = match effort {
        Effort::Brief => (5, 4, 1000),
        Effort::Quick => (7, 4, 2000),
        Effort::Full => (11, 20, 10_000),
    };
    Budget::each(rounds, slice_ms, total_ms)
}

fn time(iterations: u64, way: &mut Way<'_>) -> anyhow::Result<Sample> {
    way(Check::No)?;
    let start = Instant::now();
    for _ in 0..iterations {
        way(Check::No)?;
    }
    Ok(Sample::of_total(start.elapsed().as_nanos() as f64).per_iteration(iterations))
}

/// Whether the loaded bytes are compared.
#[derive(Clone, Copy, PartialEq)]
enum Check {
    Yes,
    No,
}

/// Loads the file once.
type Way<'a> = Box<dyn FnMut(Check) -> anyhow::Result<()> + 'a>;

/// Eight bytes of the contents of a file.
fn word_at(number: usize) -> [u8; 8] {
    splitmix64(number as u64).to_le_bytes()
}

/// A file of known contents, whole words, which is removed with its folder.
struct TestFile {
    path: PathBuf,
    bytes: usize,
}

impl TestFile {
    fn write(folder: &Path, bytes: usize) -> anyhow::Result<Self> {
        let path = folder.join("file");
        let mut contents = vec![0; bytes];
        for (number, word) in contents.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&word_at(number));
        }
        let written = std::fs::write(&path, contents);
        let what = || format!("{} for {}", path.display(), size::format(bytes as u64));
        written.with_context(what)?;
        Ok(Self { path, bytes })
    }

    fn check(&self, loaded: &[u8], check: Check) -> anyhow::Result<()> {
        if check == Check::Yes {
            let mut words = loaded.chunks_exact(8).enumerate();
            let is_equal = words.all(|(number, word)| word == word_at(number));
            ensure!(loaded.len() == self.bytes && is_equal, "a byte is wrong");
        }
        Ok(())
    }

    fn load(&self, loader: &Loader, target: &mut [u8], check: Check) -> anyhow::Result<()> {
        let source = FileSource::open(&self.path)?;
        ensure!(source.len() == target.len() as u64, "the file has changed");
        let placement = source.whole(0, target.as_mut_ptr());
        // SAFETY: the target has the length of the file and is borrowed until this function
        // returns, which is after `wait` or a drop has ended the threads of the load.
        let loading = unsafe { loader.start_raw(vec![source], &[placement], MemoryKind::Host)? };
        loading.wait()?;
        self.check(target, check)
    }

    fn load_new(&self, loader: &Loader, check: Check) -> anyhow::Result<()> {
        let mut target = Buffer::new(self.bytes)?;
        self.load(loader, &mut target, check)
    }

    fn read(&self, target: &mut [u8], check: Check) -> anyhow::Result<()> {
        File::open(&self.path)?.read_exact(target)?;
        self.check(target, check)
    }

    fn read_new(&self, check: Check) -> anyhow::Result<()> {
        self.check(&std::fs::read(&self.path)?, check)
    }

    fn map(&self, target: &mut [u8], check: Check) -> anyhow::Result<()> {
        self.with_mapping(|mapping| memcpy(target, mapping))?;
        self.check(target, check)
    }

    fn map_new(&self, check: Check) -> anyhow::Result<()> {
        let target = self.with_mapping(<[u8]>::to_vec)?;
        self.check(&target, check)
    }

    /// Maps the file while a function runs.
    fn with_mapping<T>(&self, run: impl FnOnce(&[u8]) -> T) -> anyhow::Result<T> {
        let file = File::open(&self.path)?;
        let (protection, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), self.bytes, protection, flags, &file, 0)? };
        // SAFETY: the mapping is readable and has this length. The file lies in a folder of this
        // process alone, which neither writes nor truncates it while it is mapped.
        let result = run(unsafe { std::slice::from_raw_parts(start.cast(), self.bytes) });
        // SAFETY: the mapping was made above, and the borrow of it has ended.
        unsafe { munmap(start, self.bytes)? };
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_load_a_file_is_measured_for_both_kinds_of_memory() {
        let workspace = TempWorkspace::new().unwrap();
        let loader = Loader::builder().build(Ferry::new().unwrap()).unwrap();
        let file = TestFile::write(workspace.folder(), 3 << 20).unwrap();
        let mut outcome = Outcome::new("load");
        for figure in [NEW_MEMORY, MEMORY_IN_USE] {
            measure_one(&mut outcome, &loader, &file, figure, Effort::Brief).unwrap();
        }
        assert_eq!(outcome.rows.len(), 6);
        assert!(outcome.rows.iter().all(|row| row.value > 0.0 && row.unit == "GB/s"));
        assert!(outcome.summary.is_empty());
    }

    #[test]
    fn a_wrong_byte_is_noticed() {
        let workspace = TempWorkspace::new().unwrap();
        let mut file = TestFile::write(workspace.folder(), 64).unwrap();
        assert!(file.read_new(Check::Yes).is_ok());
        std::fs::write(&file.path, [0; 64]).unwrap();
        assert!(file.read_new(Check::Yes).is_err() && file.map_new(Check::Yes).is_err());
        file.bytes = 72;
        assert!(file.read_new(Check::Yes).is_err());
    }
}
