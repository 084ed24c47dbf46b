//! Memory whose mapping changes while it is registered, or is not what it should be.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memferry_engine::cuda::DeviceMemory;
use memferry_engine::cuda::model::Faults;
use memferry_engine::{ExecutionError, MemoryKind};
use memferry_memory::pinning::Access;
use memferry_sys::residency;

use crate::common::{
    Job, MIB, OK, Place, Subject, check, device, host, outcome, pattern, patterned, sole_subjects,
    subjects, until, untouched,
};

/// Addresses of a test's own, far from where the kernel puts mappings: nobody else's memory comes to
/// lie there when it is unmapped.
#[derive(Debug)]
struct Ground {
    start: usize,
    length: usize,
}

impl Ground {
    fn new(length: usize) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1 << 45);
        let ground = Self { start: NEXT.fetch_add(1 << 30, Ordering::Relaxed), length };
        assert!(length < 1 << 30 && !residency::is_mapped(ground.start, length));
        ground
    }

    fn place(&self, at: usize) -> Place {
        Place { address: (self.start + at) as u64, kind: MemoryKind::Host }
    }

    fn address(&self, at: usize) -> *mut libc::c_void {
        std::ptr::with_exposed_provenance_mut(self.start + at)
    }

    /// Maps fresh memory with a pattern.
    fn map(&self, at: usize, length: usize, seed: u32) {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: it replaces nothing.
        let mapped = unsafe { libc::mmap(self.address(at), length, rights, flags, -1, 0) };
        assert_eq!(mapped, self.address(at), "fresh memory at an address of this test's own");
        self.write(at, &pattern(seed, length));
    }

    fn unmap(&self, at: usize, length: usize) {
        // SAFETY: the ground is this test's own, and nobody has references into it.
        assert_eq!(unsafe { libc::munmap(self.address(at), length) }, 0);
    }

    fn protect(&self, rights: libc::c_int) {
        // SAFETY: as above.
        assert_eq!(unsafe { libc::mprotect(self.address(0), self.length, rights) }, 0);
    }

    fn discard(&self) {
        let advice = libc::MADV_DONTNEED;
        // SAFETY: as above.
        assert_eq!(unsafe { libc::madvise(self.address(0), self.length, advice) }, 0);
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the ground is mapped here, and nobody else uses it now.
        unsafe { self.address(at).cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn read(&self, at: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        // SAFETY: as above.
        unsafe { self.address(at).cast::<u8>().copy_to(bytes.as_mut_ptr(), length) };
        bytes
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        self.unmap(0, self.length);
    }
}

#[track_caller]
fn check_inside(subject: &Subject, memory: &DeviceMemory, expected: &[u8]) {
    check(&subject.download(memory), 0, expected, subject.name);
}

#[test]
fn memory_that_may_only_be_read_is_a_source_and_later_a_target() {
    const SIZE: usize = 3 * MIB;
    for subject in sole_subjects() {
        let (ground, inside, target) = (Ground::new(SIZE), subject.device(SIZE), untouched(SIZE));
        ground.map(0, SIZE, 1);
        ground.protect(libc::PROT_READ);
        for to in [device(&inside, 0), host(&target, 0)] {
            for is_passing in [true, false] {
                let job = Job::copy(ground.place(0), to, SIZE).passing(is_passing);
                assert_eq!(subject.carry_out(job), OK, "{}", subject.name);
            }
        }
        check_inside(&subject, &inside, &pattern(1, SIZE));
        check(target.as_slice(), 0, &pattern(1, SIZE), subject.name);
        // What is registered for reading is not in the way of those who write later.
        ground.protect(libc::PROT_READ | libc::PROT_WRITE);
        let other = subject.upload(&pattern(2, SIZE));
        assert_eq!(subject.carry_out(Job::copy(device(&other, 0), ground.place(0), SIZE)), OK);
        check(&ground.read(0, SIZE), 0, &pattern(2, SIZE), subject.name);
        assert!(!subject.is_model() || subject.sightings().registrations > 0);
    }
}

#[test]
fn memory_that_is_unmapped_is_unregistered() {
    let subject = Subject::modelled(Faults::default());
    let inside = subject.device(4 * MIB);
    let source = patterned(1, 4 * MIB);
    assert_eq!(subject.carry_out(Job::copy(host(&source, 0), device(&inside, 0), 4 * MIB)), OK);
    let seen = subject.sightings();
    assert!(seen.registrations > 0);
    if subject.keeps() {
        assert_eq!(seen.unregistrations, 0);
        assert!(subject.registry().cache().statistics().bytes_pinned >= 4 << 20);
    }
    drop(source);
    // Without a request that would come upon it.
    until("the last unregistration", || {
        let seen = subject.sightings();
        seen.registrations == seen.unregistrations
    });
    let statistics = subject.registry().cache().statistics();
    assert_eq!((statistics.bytes_pinned, statistics.bytes_kept), (0, 0));
}

#[test]
fn memory_that_is_mapped_anew_at_the_same_place_is_copied_as_it_is_now() {
    const SIZE: usize = 2 * MIB + 4096;
    for subject in subjects() {
        let (ground, inside, target) = (Ground::new(SIZE), subject.device(SIZE), untouched(SIZE));
        ground.map(0, SIZE, 0);
        for seed in 1..40 {
            if seed % 2 == 0 {
                ground.unmap(0, SIZE);
                ground.map(0, SIZE, seed);
            } else {
                ground.discard();
                ground.write(0, &pattern(seed, SIZE));
            }
            // Late enough that those who tidy up do so at the same time, now and then.
            std::thread::sleep(std::time::Duration::from_millis(u64::from(seed % 4) * 4));
            let to = if seed % 3 == 0 { host(&target, 0) } else { device(&inside, 0) };
            assert_eq!(subject.carry_out(Job::copy(ground.place(0), to, SIZE)), OK);
            if seed % 3 == 0 {
                check(target.as_slice(), 0, &pattern(seed, SIZE), subject.name);
            } else {
                check_inside(&subject, &inside, &pattern(seed, SIZE));
            }
            let other = subject.upload(&pattern(seed + 100, SIZE));
            assert_eq!(subject.carry_out(Job::copy(device(&other, 0), ground.place(0), SIZE)), OK);
            check(&ground.read(0, SIZE), 0, &pattern(seed + 100, SIZE), subject.name);
        }
    }
}

#[test]
fn memory_mapped_anew_beside_registered_memory_in_use_is_copied_as_it_is_now() {
    const SIZE: usize = 4 * MIB;
    for subject in sole_subjects() {
        let (ground, inside) = (Ground::new(SIZE), subject.device(SIZE / 2));
        ground.map(0, SIZE, 1);
        let start = ground.start as u64;
        // What a copy over the first half would hold, were it in flight all the time.
        // Nothing is registered while mappings keep changing, as they do in tests beside this one.
        let mut lease = None;
        until("memory can be registered", || {
            lease = subject.registry().acquire(start, SIZE as u64, Access::Write).ok();
            lease.is_some()
        });
        ground.unmap(SIZE / 2, SIZE / 2);
        ground.map(SIZE / 2, SIZE / 2, 2);
        for _ in 0..2 {
            let job = Job::copy(ground.place(SIZE / 2), device(&inside, 0), SIZE / 2);
            assert_eq!(subject.carry_out(job), OK);
            check_inside(&subject, &inside, &pattern(2, SIZE / 2));
        }
        let other = subject.upload(&pattern(3, SIZE / 2));
        let job = Job::copy(device(&other, 0), ground.place(SIZE / 2), SIZE / 2);
        assert_eq!(subject.carry_out(job), OK);
        check(&ground.read(SIZE / 2, SIZE / 2), 0, &pattern(3, SIZE / 2), subject.name);
        drop(lease);
        // Nothing of it is left for later.
        assert_eq!(subject.carry_out(job), OK);
        ground.write(SIZE / 2, &pattern(4, SIZE / 2));
        let job = Job::copy(ground.place(SIZE / 2), device(&inside, 0), SIZE / 2);
        assert_eq!(subject.carry_out(job), OK);
        check_inside(&subject, &inside, &pattern(4, SIZE / 2));
    }
}

#[test]
fn a_source_that_is_not_there_is_an_error_and_the_channel_goes_on() {
    for subject in subjects() {
        let (inside, target) = (subject.device(MIB), untouched(MIB));
        let nowhere = Place { address: 1 << 44, kind: MemoryKind::Host };
        assert!(!residency::is_mapped(nowhere.address as usize, MIB));
        for cut in [None, Some(64 << 10)] {
            for to in [device(&inside, 0), host(&target, 0)] {
                let error = subject.carry_out(Job::copy(nowhere, to, MIB).cut(cut)).unwrap_err();
                let (address, done_bytes) = (nowhere.address, 0);
                assert_eq!(error, ExecutionError::BadMemory { address, done_bytes });
            }
            let job = Job::copy(device(&inside, 0), nowhere, MIB).cut(cut);
            let error = subject.carry_out(job).unwrap_err();
            assert!(matches!(error, ExecutionError::BadMemory { .. }), "{error}");
            let fill = subject.carry_out(Job::fill(nowhere, MIB, 1).cut(cut)).unwrap_err();
            assert!(matches!(fill, ExecutionError::BadMemory { .. }), "{fill}");
        }
        check(target.as_slice(), 0, &[], subject.name);
        let source = patterned(1, MIB);
        assert_eq!(subject.carry_out(Job::copy(host(&source, 0), device(&inside, 0), MIB)), OK);
        check_inside(&subject, &inside, source.as_slice());
    }
}

#[test]
fn a_source_that_is_not_there_is_an_error_while_other_mappings_keep_changing() {
    let subject = Subject::modelled(Faults::default());
    let (inside, over) = (subject.device(MIB), AtomicBool::new(false));
    let nowhere = Place { address: 1 << 44, kind: MemoryKind::Host };
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (subject, over) = (&subject, &over);
            scope.spawn(move || {
                let ground = Ground::new(MIB);
                ground.map(0, MIB, seed);
                while !over.load(Ordering::Relaxed) {
                    drop(subject.registry().acquire(ground.start as u64, 4096, Access::Read));
                    ground.unmap(0, MIB);
                    ground.map(0, MIB, seed);
                }
            });
        }
        for turn in 0..1000 {
            let job = Job::copy(nowhere, device(&inside, 0), MIB).passing(turn % 2 == 0);
            let error = subject.carry_out(job).unwrap_err();
            assert!(matches!(error, ExecutionError::BadMemory { .. }), "{error}");
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_source_that_ends_early_is_copied_up_to_somewhere_before_its_end() {
    const THERE: usize = 5 * MIB;
    for subject in subjects() {
        let (ground, inside) = (Ground::new(THERE), subject.device(8 * MIB));
        ground.map(0, THERE, 1);
        let job = Job::copy(ground.place(0), device(&inside, 0), 8 * MIB);
        let completions = [subject.begin(job), subject.begin(job.cut(Some(MIB)))];
        for completion in completions {
            let error = outcome(&completion).unwrap_err();
            let ExecutionError::BadMemory { address, done_bytes } = error else {
                panic!("{error}")
            };
            assert!((1..=THERE as u64).contains(&done_bytes), "{done_bytes} bytes are done");
            assert!((ground.start..=ground.start + THERE).contains(&(address as usize)));
            let found = subject.download(&inside);
            let done = done_bytes as usize;
            assert!(found[..done] == ground.read(0, done), "what is told as done is done");
        }
    }
}
