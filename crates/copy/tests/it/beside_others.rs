//! A ferry beside another user of the same GPU, such as PyTorch, over a model of the device that
//! rejects what the driver rejects: a copy that crosses the boundary of a registered range. The
//! sizes are a fraction of those of the test on a real GPU
//! (`crates/c/tests/torch/beside_torch.py`).

use crate::common::gpu_fixture;

use crate::common::pattern;
use gpu_fixture::{GpuFixture, machine, sole_machine};
use memferry_copy::Options;
use memferry_engine::DeviceBuffer;
use memferry_engine::testing::cuda_model::CudaFaults;
use memferry_sys::Pages;
use memferry_sys::cuda::{CudaDriver, MemcpyKind};
use memferry_sys::pages::page_bytes;

const MIB: usize = 1 << 20;
/// The first two are too small for the registration cache of a sole user.
const SIZES: [usize; 4] = [70_001, MIB - 1, MIB, 3 * MIB + 77];

/// Memory of which both users use parts, as of a heap.
struct Heap {
    pages: Pages,
    contents: Vec<u8>,
}

impl Heap {
    fn new(bytes: usize, seed: u64) -> Self {
        let (mut pages, contents) = (Pages::new(bytes).unwrap(), pattern(bytes, seed));
        pages.as_mut_slice().copy_from_slice(&contents);
        Self { pages, contents }
    }

    /// Other memory at the same addresses, as after a free and an allocation by `mmap`.
    fn map_anew(&mut self, seed: u64) {
        let (rights, length) = (libc::PROT_READ | libc::PROT_WRITE, self.pages.len());
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let address = self.pages.as_ptr().cast();
        // SAFETY: in place of pages that are this value's alone; no reference to them is left.
        let mapped = unsafe { libc::mmap(address, length, rights, flags, -1, 0) };
        assert_eq!(mapped, address);
        self.contents = pattern(length, seed);
        self.pages.as_mut_slice().copy_from_slice(&self.contents);
    }
}

/// The other user.
struct OtherUser<'a> {
    machine: &'a GpuFixture,
    scratch: DeviceBuffer,
}

impl<'a> OtherUser<'a> {
    fn new(machine: &'a GpuFixture, bytes: usize) -> Self {
        Self { machine, scratch: machine.engine.allocate(bytes).unwrap() }
    }

    /// Copies a part of a heap to the device and back; returns the number of refused copies.
    fn copies(&self, heap: &mut Heap, from: usize, to: usize) -> usize {
        let (device, inside) = (&self.machine.device, self.scratch.address());
        let bytes = &mut heap.pages.as_mut_slice()[from..to];
        let (expected, address) = (&heap.contents[from..to], bytes.as_mut_ptr() as u64);
        // SAFETY: both ranges have this length, and no other thread uses them now.
        let inward =
            unsafe { device.copy_by_other(MemcpyKind::HostToDevice, address, inside, bytes.len()) };
        if inward.is_ok() {
            assert!(device.read(inside, bytes.len()) == expected);
            bytes.fill(0);
        }
        device.write(inside, expected);
        // SAFETY: as above.
        let outward =
            unsafe { device.copy_by_other(MemcpyKind::DeviceToHost, inside, address, bytes.len()) };
        if outward.is_err() {
            bytes.copy_from_slice(expected);
        }
        assert!(bytes == expected);
        usize::from(inward.is_err()) + usize::from(outward.is_err())
    }

    /// Pins and unpins a part of a heap; returns whether that was refused.
    fn pins(&self, heap: &Heap, from: usize, to: usize) -> usize {
        let address = heap.pages.as_ptr() as usize + from;
        match self.machine.device.register(address, to - from, false) {
            Ok(()) => {
                // SAFETY: nothing is copied there now.
                unsafe { self.machine.device.unregister(address) }.unwrap();
                0
            }
            Err(_) => 1,
        }
    }

    /// Ranges at the boundaries of a range, across them, inside and around it.
    fn all(&self, heap: &mut Heap, start: usize, end: usize) -> usize {
        let (middle, page) = ((start + end) / 2, page_bytes());
        let parts = [
            (start, end),
            (start - 1, start + 1),
            (end - 1, end + 1),
            (start - page - 1, middle),
            (middle, end + page + 1),
            (start + 1, end - 1),
            (start - 30_000, start),
            (end, end + 30_000),
            (0, heap.contents.len()),
        ];
        let copied: usize = parts.iter().map(|(from, to)| self.copies(heap, *from, *to)).sum();
        let pinned: usize = parts.iter().map(|(from, to)| self.pins(heap, *from, *to)).sum();
        copied + pinned
    }
}

/// Copies of ours and of the other user in alternation; returns how many of the other's were
/// refused.
fn alternate(machine: &GpuFixture) -> usize {
    let ferry = &machine.ferry;
    let (start, mut refused) = (100 * page_bytes() + 321, 0);
    let other = OtherUser::new(machine, 2 * SIZES[SIZES.len() - 1]);
    for (round, size) in SIZES.into_iter().enumerate() {
        for copies in [1, 2, 4] {
            let mut heap = Heap::new(start + size + 200 * page_bytes(), round as u64 + copies);
            let mut inside = machine.engine.allocate(size).unwrap();
            let mut target = Heap::new(size + 60 * page_bytes(), 99);
            for _ in 0..copies {
                let part = &heap.pages.as_slice()[start..start + size];
                ferry.copy_to_device(part, &mut inside, 0).unwrap();
                let expected = &heap.contents[start..start + size];
                assert!(machine.device.read(inside.address(), size) == expected);
                refused += other.all(&mut heap, start, start + size);
                let part = &mut heap.pages.as_mut_slice()[start..start + size];
                part.fill(0);
                ferry.copy_from_device(&inside, 0, part).unwrap();
                assert!(heap.pages.as_slice() == heap.contents);
                refused += other.all(&mut heap, start, start + size);
                let (part, at) = (&heap.pages.as_slice()[start..start + size], 40_000);
                let into = &mut target.pages.as_mut_slice()[at..at + size];
                ferry.copy_with(part, into, Options::new().no_caller_assist()).unwrap();
                target.contents[at..at + size].copy_from_slice(part);
                refused += other.all(&mut heap, start, start + size);
                refused += other.all(&mut target, at, at + size);
            }
            // Freed, and allocated again with other boundaries.
            heap.map_anew(copies + 50);
            refused += other.all(&mut heap, start - 50_000, start + size / 2);
            let part = &heap.pages.as_slice()[start + 100..start + size / 2];
            ferry.copy_to_device(part, &mut inside, 0).unwrap();
            assert!(machine.device.read(inside.address(), part.len()) == part);
            refused += other.all(&mut heap, start, start + size);
        }
    }
    refused
}

#[test]
fn nothing_of_another_user_is_refused_and_every_byte_is_right() {
    let machine = machine(CudaFaults::default());
    assert_eq!(alternate(&machine), 0);
    assert_eq!(machine.device.registered(), [], "nothing is left registered");
    let seen = machine.device.stats();
    assert_eq!((seen.unregistered_in_flight, seen.outside_registration), (0, 0));
}

#[test]
fn another_user_is_refused_where_the_program_says_that_there_is_none() {
    // This is the price of the option, and shows that the test above can fail.
    let machine = sole_machine(CudaFaults::default());
    assert!(alternate(&machine) > 0);
}

#[test]
fn memory_that_is_registered_is_one_piece_for_another_user_too() {
    let machine = machine(CudaFaults::default());
    let (size, start) = (3 * MIB + 77, 100 * page_bytes() + 321);
    let mut heap = Heap::new(start + size + 200 * page_bytes(), 5);
    let other = OtherUser::new(&machine, heap.contents.len());
    let mut inside = machine.engine.allocate(size).unwrap();
    let address = heap.pages.as_ptr().wrapping_add(start);
    // SAFETY: the heap outlives the region.
    let region = unsafe { machine.ferry.register(address, size) }.unwrap();
    assert_eq!(machine.device.registered(), [(address as usize, size)]);
    for _ in 0..4 {
        let part = &heap.pages.as_slice()[start..start + size];
        machine.ferry.copy_to_device(part, &mut inside, 0).unwrap();
        assert!(machine.device.read(inside.address(), size) == part);
        // All of it, a part of it, and the bytes beside it on the same pages.
        let parts = [(start, start + size), (start + 9, start + MIB), (start - 300, start)];
        let behind = (start + size, start + size + 300);
        for (from, to) in parts.into_iter().chain([behind]) {
            assert_eq!(other.copies(&mut heap, from, to), 0);
        }
        // A copy of ours that crosses the boundary is split into parts.
        let part = &heap.pages.as_slice()[start - 77..start + size - 77];
        machine.ferry.copy_to_device(part, &mut inside, 0).unwrap();
        assert!(machine.device.read(inside.address(), size) == part);
    }
    drop(region);
    assert_eq!(other.all(&mut heap, start, start + size), 0);
    assert_eq!(machine.device.registered(), []);
}

#[test]
fn memory_that_another_user_has_pinned_is_used_as_it_is() {
    let machine = machine(CudaFaults::default());
    let (source, target) = (Heap::new(4 * MIB, 1), Heap::new(4 * MIB, 2));
    let at = |heap: &Heap| heap.pages.as_ptr() as usize;
    for heap in [&source, &target] {
        machine.device.register(at(heap), 4 * MIB, false).unwrap();
    }
    let mut copy = target;
    let options = Options::new().no_caller_assist();
    machine.ferry.copy_with(source.pages.as_slice(), copy.pages.as_mut_slice(), options).unwrap();
    assert!(copy.pages.as_slice() == source.contents);
    assert_eq!(machine.ferry.statistics().engine("cuda").bytes, 4 * MIB as u64, "by the device");
    // SAFETY: the pages outlive the region.
    let region = unsafe { machine.ferry.register(source.pages.as_ptr(), 4 * MIB) }.unwrap();
    drop(region);
    assert_eq!(machine.device.stats().registrations, 2, "only the other user's");
    assert_eq!(machine.device.stats().unregistrations, 0);
    for heap in [&source, &copy] {
        // SAFETY: every copy is complete.
        unsafe { machine.device.unregister(at(heap)) }.unwrap();
    }
}
