//! A process that is killed while devices work for it: nothing of it stays mapped, pinned or open, and
//! the next process uses such devices as if nothing had happened.
//!
//! The models die with their process, as the kernel closes a device with its. What the kernel itself
//! holds is real: the targets are shared memory that the child maps and whose frames it pins (by an
//! io_uring, where that is permitted). The parent asks the kernel to seal that memory against writes,
//! which it refuses while a writable mapping or a pin of any process exists. `cargo xtask qemu` does the
//! same with the emulated card and VFIO's own pins.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use memferry_copy::{Ferry, Options, Request};
use memferry_engine::Engine;
use memferry_engine::dsa::DsaEngine;
use memferry_engine::ioat::IoatEngine;
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel, IdxdModel, IdxdModelOptions};
use memferry_engine::testing::ioat_model::{IoatFaults, IoatModel};
use memferry_memory::pinning::{Access, PageRange, Pinner};
use memferry_testing::{RingPinner, until};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const BYTES: usize = 1 << 20;
/// Marks the child: the kind of its device, and the number of the descriptor of the shared memory.
const CHILD: &str = "MEMFERRY_TEST_KILLED_CHILD";

/// A ferry over a device that takes this long for a descriptor, once it is open.
fn ferry(kind: &str, delay: Duration) -> Ferry {
    let over = |engine: Arc<dyn Engine>| {
        Ferry::builder().engine(engine, 1).inline_bytes(0).build().unwrap()
    };
    let dsa_faults = DsaFaults { delay, ..DsaFaults::default() };
    match kind {
        "ioat" => {
            let model = IoatModel::builder().contiguous(true).build();
            let ferry = over(Arc::new(IoatEngine::over_model(model.clone()).unwrap()));
            model.set_faults(IoatFaults { delay, ..IoatFaults::default() });
            ferry
        }
        "dsa" => {
            let model = DsaModel::new();
            let ferry = over(Arc::new(DsaEngine::over_model(model.clone()).unwrap()));
            model.set_faults(dsa_faults);
            ferry
        }
        _ => {
            let model = IdxdModel::new(IdxdModelOptions::default()).unwrap();
            let ferry = over(Arc::new(DsaEngine::over_idxd_model(model.clone()).unwrap()));
            model.device().set_faults(dsa_faults);
            ferry
        }
    }
}

/// Not a test by itself: the work of the child until it is killed.
#[test]
#[allow(clippy::print_stderr, reason = "tells the parent; the harness captures standard output")]
fn a_child_has_copies_in_flight_until_it_is_killed() {
    let Ok(what) = std::env::var(CHILD) else { return };
    let (kind, descriptor) = what.split_once(' ').unwrap();
    let descriptor: i32 = descriptor.parse().unwrap();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a descriptor that the parent left open for this process.
    let target =
        unsafe { libc::mmap(ptr::null_mut(), BYTES, protection, libc::MAP_SHARED, descriptor, 0) };
    assert_ne!(target, libc::MAP_FAILED);
    let pinner = RingPinner::new();
    let range = PageRange::covering(target as usize, BYTES).unwrap();
    let pins = pinner.as_ref().map(|pinner| pinner.pin(range, Access::Write).unwrap());
    let ferry = ferry(kind, Duration::from_secs(3600));
    let source = vec![7u8; BYTES];
    let request = Request::copy(source.as_ptr(), target.cast(), BYTES);
    // SAFETY: both exist until the process ends.
    let copy = unsafe { ferry.start_raw(request.with(Options::new().no_caller_assist())) };
    eprintln!("in flight");
    copy.unwrap().wait().unwrap();
    drop(pins);
}

/// Shared memory whose descriptor children inherit.
fn shared_memory() -> OwnedFd {
    let memory = memfd_create("memferry-killed", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, BYTES as u64).unwrap();
    memory
}

#[test]
fn nothing_of_a_killed_process_stays_mapped_or_pinned() {
    for kind in ["ioat", "dsa", "idxd"] {
        let memory = shared_memory();
        // The child cannot remove the files of its model.
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "killed::a_child_has_copies_in_flight_until_it_is_killed",
                "--nocapture",
            ])
            .env(CHILD, format!("{kind} {}", memory.as_raw_fd()))
            .env("TMPDIR", folder.path())
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stderr.take().unwrap());
        let is_ready = output.by_ref().lines().any(|line| line.unwrap() == "in flight");
        assert!(is_ready, "the child never started");
        // While it lives, its mapping is in the way.
        assert!(fcntl_add_seals(&memory, SealFlags::WRITE).is_err(), "nothing was mapped");
        child.kill().unwrap();
        child.wait().unwrap();
        // All its descriptors are closed, also those of its threads.
        assert_eq!(output.read_to_end(&mut Vec::new()).unwrap(), 0);
        // The kernel ends the pins of a ring a little later.
        until("no mapping and no pin", || fcntl_add_seals(&memory, SealFlags::WRITE).is_ok());
        // The next process, here this one, uses such a device.
        let (source, target) = (vec![9u8; BYTES], vec![0u8; BYTES]);
        let (_, target) =
            ferry(kind, Duration::ZERO).icopy(source, target).unwrap().wait().unwrap();
        assert!(target.iter().all(|byte| *byte == 9));
    }
}
