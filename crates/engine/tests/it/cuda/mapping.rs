//! Memory whose mapping changes while it is registered, or that is not fully mapped.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memferry_engine::DeviceBuffer;
use memferry_engine::testing::cuda_model::CudaFaults;
use memferry_engine::{ExecutionError, MemoryKind};
use memferry_memory::pinning::Access;
use memferry_sys::residency;

use crate::cuda::common::{
    CudaOperation, CudaUnderTest, MIB, MemoryAddress, OK, check, device, host, outcome, pattern,
    patterned, sole_subjects, subjects, untouched, wait_until,
};

/// Addresses of a test's own, far from where the kernel places mappings: no other mapping takes
/// them after an unmap.
#[derive(Debug)]
struct FixedMapping {
    start: usize,
    length: usize,
}

impl FixedMapping {
    fn new(length: usize) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1 << 45);
        let mapping = Self { start: NEXT.fetch_add(1 << 30, Ordering::Relaxed), length };
        assert!(length < 1 << 30 && !residency::is_mapped(mapping.start, length));
        mapping
    }

    fn address_at(&self, at: usize) -> MemoryAddress {
        MemoryAddress { address: (self.start + at) as u64, kind: MemoryKind::Host }
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
        // SAFETY: the addresses are this test's own, and no references into them exist.
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
        // SAFETY: the range is mapped, and nothing else uses it now.
        unsafe { self.address(at).cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn read(&self, at: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        // SAFETY: as above.
        unsafe { self.address(at).cast::<u8>().copy_to(bytes.as_mut_ptr(), length) };
        bytes
    }
}

impl Drop for FixedMapping {
    fn drop(&mut self) {
        self.unmap(0, self.length);
    }
}

#[track_caller]
fn check_inside(subject: &CudaUnderTest, memory: &DeviceBuffer, expected: &[u8]) {
    check(&subject.download(memory), 0, expected, subject.name);
}

#[test]
fn memory_that_may_only_be_read_is_a_source_and_later_a_target() {
    const SIZE: usize = 3 * MIB;
    for subject in sole_subjects() {
        let (mapping, inside, target) =
            (FixedMapping::new(SIZE), subject.device(SIZE), untouched(SIZE));
        mapping.map(0, SIZE, 1);
        mapping.protect(libc::PROT_READ);
        for to in [device(&inside, 0), host(&target, 0)] {
            for is_passing in [true, false] {
                let job =
                    CudaOperation::copy(mapping.address_at(0), to, SIZE).transient(is_passing);
                assert_eq!(subject.execute(job), OK, "{}", subject.name);
            }
        }
        check_inside(&subject, &inside, &pattern(1, SIZE));
        check(target.as_slice(), 0, &pattern(1, SIZE), subject.name);
        // A read-only registration must not block later writes.
        mapping.protect(libc::PROT_READ | libc::PROT_WRITE);
        let other = subject.upload(&pattern(2, SIZE));
        assert_eq!(
            subject.execute(CudaOperation::copy(device(&other, 0), mapping.address_at(0), SIZE)),
            OK
        );
        check(&mapping.read(0, SIZE), 0, &pattern(2, SIZE), subject.name);
        assert!(!subject.is_model() || subject.stats().registrations > 0);
    }
}

#[test]
fn memory_that_is_unmapped_is_unregistered() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let inside = subject.device(4 * MIB);
    let source = patterned(1, 4 * MIB);
    assert_eq!(
        subject.execute(CudaOperation::copy(host(&source, 0), device(&inside, 0), 4 * MIB)),
        OK
    );
    let seen = subject.stats();
    assert!(seen.registrations > 0);
    if subject.caches_registrations() {
        assert_eq!(seen.unregistrations, 0);
        assert!(subject.registrations().cache().statistics().bytes_pinned >= 4 << 20);
    }
    drop(source);
    // Without a request that would find it.
    wait_until("the last unregistration", || {
        let seen = subject.stats();
        seen.registrations == seen.unregistrations
    });
    let statistics = subject.registrations().cache().statistics();
    assert_eq!((statistics.bytes_pinned, statistics.bytes_cached), (0, 0));
}

#[test]
fn memory_that_is_mapped_anew_at_the_same_place_is_copied_as_it_is_now() {
    const SIZE: usize = 2 * MIB + 4096;
    for subject in subjects() {
        let (mapping, inside, target) =
            (FixedMapping::new(SIZE), subject.device(SIZE), untouched(SIZE));
        mapping.map(0, SIZE, 0);
        for seed in 1..40 {
            if seed % 2 == 0 {
                mapping.unmap(0, SIZE);
                mapping.map(0, SIZE, seed);
            } else {
                mapping.discard();
                mapping.write(0, &pattern(seed, SIZE));
            }
            // Delayed, so that the reaper thread sometimes runs at the same time.
            std::thread::sleep(std::time::Duration::from_millis(u64::from(seed % 4) * 4));
            let to = if seed % 3 == 0 { host(&target, 0) } else { device(&inside, 0) };
            assert_eq!(subject.execute(CudaOperation::copy(mapping.address_at(0), to, SIZE)), OK);
            if seed % 3 == 0 {
                check(target.as_slice(), 0, &pattern(seed, SIZE), subject.name);
            } else {
                check_inside(&subject, &inside, &pattern(seed, SIZE));
            }
            let other = subject.upload(&pattern(seed + 100, SIZE));
            assert_eq!(
                subject.execute(CudaOperation::copy(
                    device(&other, 0),
                    mapping.address_at(0),
                    SIZE
                )),
                OK
            );
            check(&mapping.read(0, SIZE), 0, &pattern(seed + 100, SIZE), subject.name);
        }
    }
}

#[test]
fn memory_mapped_anew_beside_registered_memory_in_use_is_copied_as_it_is_now() {
    const SIZE: usize = 4 * MIB;
    for subject in sole_subjects() {
        let (mapping, inside) = (FixedMapping::new(SIZE), subject.device(SIZE / 2));
        mapping.map(0, SIZE, 1);
        let start = mapping.start as u64;
        // The registration that a copy over the first half would hold if it were in flight all the
        // time. Nothing is registered while mappings change, as they do in concurrent tests.
        let mut lease = None;
        wait_until("memory can be registered", || {
            lease = subject.registrations().acquire(start, SIZE as u64, Access::Write).ok();
            lease.is_some()
        });
        mapping.unmap(SIZE / 2, SIZE / 2);
        mapping.map(SIZE / 2, SIZE / 2, 2);
        for _ in 0..2 {
            let job =
                CudaOperation::copy(mapping.address_at(SIZE / 2), device(&inside, 0), SIZE / 2);
            assert_eq!(subject.execute(job), OK);
            check_inside(&subject, &inside, &pattern(2, SIZE / 2));
        }
        let other = subject.upload(&pattern(3, SIZE / 2));
        let job = CudaOperation::copy(device(&other, 0), mapping.address_at(SIZE / 2), SIZE / 2);
        assert_eq!(subject.execute(job), OK);
        check(&mapping.read(SIZE / 2, SIZE / 2), 0, &pattern(3, SIZE / 2), subject.name);
        drop(lease);
        // No registration of it is cached.
        assert_eq!(subject.execute(job), OK);
        mapping.write(SIZE / 2, &pattern(4, SIZE / 2));
        let job = CudaOperation::copy(mapping.address_at(SIZE / 2), device(&inside, 0), SIZE / 2);
        assert_eq!(subject.execute(job), OK);
        check_inside(&subject, &inside, &pattern(4, SIZE / 2));
    }
}

#[test]
fn a_source_that_is_not_there_is_an_error_and_the_channel_goes_on() {
    for subject in subjects() {
        let (inside, target) = (subject.device(MIB), untouched(MIB));
        let nowhere = MemoryAddress { address: 1 << 44, kind: MemoryKind::Host };
        assert!(!residency::is_mapped(nowhere.address as usize, MIB));
        for cut in [None, Some(64 << 10)] {
            for to in [device(&inside, 0), host(&target, 0)] {
                let error =
                    subject.execute(CudaOperation::copy(nowhere, to, MIB).cut(cut)).unwrap_err();
                let (address, done_bytes) = (nowhere.address, 0);
                assert_eq!(error, ExecutionError::BadMemory { address, done_bytes });
            }
            let job = CudaOperation::copy(device(&inside, 0), nowhere, MIB).cut(cut);
            let error = subject.execute(job).unwrap_err();
            assert!(matches!(error, ExecutionError::BadMemory { .. }), "{error}");
            let fill = subject.execute(CudaOperation::fill(nowhere, MIB, 1).cut(cut)).unwrap_err();
            assert!(matches!(fill, ExecutionError::BadMemory { .. }), "{fill}");
        }
        check(target.as_slice(), 0, &[], subject.name);
        let source = patterned(1, MIB);
        assert_eq!(
            subject.execute(CudaOperation::copy(host(&source, 0), device(&inside, 0), MIB)),
            OK
        );
        check_inside(&subject, &inside, source.as_slice());
    }
}

#[test]
fn a_source_that_is_not_there_is_an_error_while_other_mappings_keep_changing() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let (inside, is_stopped) = (subject.device(MIB), AtomicBool::new(false));
    let nowhere = MemoryAddress { address: 1 << 44, kind: MemoryKind::Host };
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (subject, is_stopped) = (&subject, &is_stopped);
            scope.spawn(move || {
                let mapping = FixedMapping::new(MIB);
                mapping.map(0, MIB, seed);
                while !is_stopped.load(Ordering::Relaxed) {
                    drop(subject.registrations().acquire(mapping.start as u64, 4096, Access::Read));
                    mapping.unmap(0, MIB);
                    mapping.map(0, MIB, seed);
                }
            });
        }
        for round in 0..1000 {
            let job =
                CudaOperation::copy(nowhere, device(&inside, 0), MIB).transient(round % 2 == 0);
            let error = subject.execute(job).unwrap_err();
            assert!(matches!(error, ExecutionError::BadMemory { .. }), "{error}");
        }
        is_stopped.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_source_that_ends_early_is_copied_up_to_somewhere_before_its_end() {
    const MAPPED: usize = 5 * MIB;
    for subject in subjects() {
        let (mapping, inside) = (FixedMapping::new(MAPPED), subject.device(8 * MIB));
        mapping.map(0, MAPPED, 1);
        let job = CudaOperation::copy(mapping.address_at(0), device(&inside, 0), 8 * MIB);
        let completions = [subject.start(job), subject.start(job.cut(Some(MIB)))];
        for completion in completions {
            let error = outcome(&completion).unwrap_err();
            let ExecutionError::BadMemory { address, done_bytes } = error else {
                panic!("{error}")
            };
            assert!((1..=MAPPED as u64).contains(&done_bytes), "{done_bytes} bytes are done");
            assert!((mapping.start..=mapping.start + MAPPED).contains(&(address as usize)));
            let found = subject.download(&inside);
            let done = done_bytes as usize;
            assert!(found[..done] == mapping.read(0, done), "the reported bytes are copied");
        }
    }
}
