//! Runs over a model of a GPU, because not every machine has one.

use memferry::PinLimits;
use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
use memferry::engine::cuda::CudaProfile;
use memferry::engine::testing::cuda_model::{CudaFaults, CudaModel};

use super::*;
use crate::code::{ADMA_ENOMEM, ADMA_ENXIO};

fn open_with(faults: CudaFaults) -> (LibraryState, Arc<CudaModel>) {
    let device = CudaModel::with_faults(faults);
    let limits = PinLimits { max_bytes: 64 << 20, max_entries: 64 };
    let gpu = CudaEngine::with_driver(device.clone(), CudaProfile::default(), limits).unwrap();
    let gpu = Arc::new(gpu);
    let profile = CpuProfile::load(&ProfileSource::BuiltIn).unwrap();
    let ferry = Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .engine(Arc::new(CpuEngine::new(profile)), 1)
        .engine(gpu.clone(), 2)
        .build()
        .unwrap();
    (LibraryState { gpu: Some(gpu), ..LibraryState::new(ferry) }, device)
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 131 + at / 251) as u8).collect()
}

#[test]
fn requests_find_the_memory_of_the_gpu_on_either_side() {
    let (open, device) = open_with(CudaFaults::default());
    for length in [1, 4096, 70_000, 3_000_017] {
        let (source, mut target) = (bytes(length), vec![0; length]);
        let inside = open.allocate(length).unwrap();
        let other = open.allocate(length).unwrap();
        // SAFETY: all memory has this length and no other thread uses it.
        unsafe {
            open.ferry().run_raw(open.copy(source.as_ptr(), inside, length)).unwrap();
            open.ferry().run_raw(open.copy(inside, other, length)).unwrap();
            open.ferry().run_raw(open.copy(other, target.as_mut_ptr(), length)).unwrap();
        }
        assert!(source == target, "{length}");
        // SAFETY: as above.
        let compared = unsafe {
            open.ferry().run_raw(open.fill(other, 7, length - 1)).unwrap();
            open.ferry().run_raw(open.compare(other, target.as_ptr(), length)).unwrap()
        };
        let expected: Vec<_> = std::iter::repeat_n(7, length - 1)
            .chain(source[length - 1..].iter().copied())
            .collect();
        assert_eq!(device.read(other as u64, length), expected);
        let first = expected.iter().zip(&source).position(|(left, right)| left != right);
        assert_eq!(compared.difference.map(|at| at as usize), first);
        open.free(inside).unwrap();
        open.free(other).unwrap();
    }
}

#[test]
fn a_delivery_from_or_to_the_gpu_is_refused() {
    let (open, _device) = open_with(CudaFaults::default());
    let (host, inside) = (bytes(64), open.allocate(64).unwrap());
    let (host, inside) = (host.as_ptr(), inside.cast_const());
    assert!(open.refuse_device_memory([host, host].into_iter()).is_ok());
    for addresses in [[host, inside], [inside, host]] {
        let failure = open.refuse_device_memory(addresses.into_iter()).unwrap_err();
        assert_eq!(failure.code, ADMA_EOPNOTSUPP);
    }
}

#[test]
fn memory_of_the_gpu_is_given_back_once_and_only_by_its_address() {
    let (open, _device) = open_with(CudaFaults::default());
    let memory = open.allocate(4096).unwrap();
    assert_eq!(open.free(memory.wrapping_add(8)).unwrap_err().code, ADMA_EINVAL);
    open.free(memory).unwrap();
    assert_eq!(open.free(memory).unwrap_err().code, ADMA_EINVAL);
    assert!(open.allocate(0).unwrap().is_null());
}

#[test]
fn closing_gives_back_what_the_program_has_left() {
    let (open, device) = open_with(CudaFaults::default());
    let host = bytes(1 << 20);
    open.allocate(1 << 20).unwrap();
    open.register(host.as_ptr(), host.len()).unwrap();
    drop(open);
    let seen = device.stats();
    assert_eq!(seen.device_bytes, 0);
    assert_eq!(seen.registrations, seen.unregistrations);
}

#[test]
fn closing_waits_for_copies_before_it_gives_memory_back_also_with_memory_registered() {
    let delay = std::time::Duration::from_millis(5);
    let (open, device) = open_with(CudaFaults { delay, ..CudaFaults::default() });
    let host = bytes(8 << 20);
    let inside = open.allocate(8 << 20).unwrap();
    open.register(host.as_ptr(), host.len()).unwrap();
    // SAFETY: the memory lives until the library is closed, which is when the copy is complete.
    unsafe { open.ferry().start_cookie_raw(open.copy(host.as_ptr(), inside, host.len())) }.unwrap();
    drop(open);
    let seen = device.stats();
    assert_eq!((seen.unregistered_in_flight, seen.device_bytes), (0, 0));
    assert_eq!(device.registered(), []);
}

#[test]
fn a_gpu_without_memory_left_says_so() {
    let (open, _device) =
        open_with(CudaFaults { max_device_bytes: Some(64 << 20), ..CudaFaults::default() });
    assert_eq!(open.allocate(1 << 30).unwrap_err().code, ADMA_ENOMEM);
}

#[test]
fn memory_stays_registered_until_it_is_unregistered_as_often() {
    let (open, device) = open_with(CudaFaults::default());
    let host = bytes(1 << 20);
    let is_registered = || open.gpu().unwrap().memory_kind(host.as_ptr() as u64).is_some();
    open.register(host.as_ptr(), host.len()).unwrap();
    open.register(host.as_ptr(), host.len()).unwrap();
    assert!(is_registered());
    open.unregister(host.as_ptr()).unwrap();
    assert!(is_registered());
    open.unregister(host.as_ptr()).unwrap();
    assert_eq!(open.unregister(host.as_ptr()).unwrap_err().code, ADMA_EINVAL);
    assert_eq!(device.stats().unregistered_in_flight, 0);
}

#[test]
fn memory_that_is_not_there_is_not_registered() {
    let (open, _device) = open_with(CudaFaults::default());
    // No allocation has such a low address, so no other test uses it.
    let address = std::ptr::without_provenance(1 << 16);
    assert_eq!(open.register(address, 1 << 20).unwrap_err().code, ADMA_ENXIO);
    open.register(std::ptr::null(), 0).unwrap();
    open.unregister(std::ptr::null()).unwrap();
}

#[test]
fn without_a_gpu_there_is_none_of_its_memory() {
    let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).channels(1).build().unwrap();
    let open = LibraryState { gpu: None, ..LibraryState::new(ferry) };
    let host = bytes(4096);
    for failure in [open.allocate(1).unwrap_err(), open.register(host.as_ptr(), 1).unwrap_err()] {
        assert_eq!(failure.code, ADMA_ENODEV);
        assert!(failure.text.contains("adma_use_gpu"), "{}", failure.text);
    }
}
