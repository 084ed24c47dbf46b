//! Submissions while a command for another queue of the device runs.

use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use memferry_engine::dsa::{DeviceWithPortals, DsaEngine, registers};
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel};
use memferry_engine::testing::ioat_model::FaultSchedule;
use memferry_sys::device::{DmaDevice, DmaDirection, Width};

use super::rig::DsaRig;

/// Only a hang reaches this time.
const TIMEOUT: Duration = Duration::from_secs(200);

/// A device whose commands do not end while it is held.
#[derive(Debug)]
struct HeldDevice {
    model: Arc<DsaModel>,
    state: Mutex<HeldState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct HeldState {
    is_held: bool,
    has_command: bool,
}

impl HeldDevice {
    fn set_held(&self, is_held: bool) {
        self.state.lock().unwrap().is_held = is_held;
        self.changed.notify_all();
    }

    /// Waits until somebody waits for a command.
    fn wait_for_command(&self) {
        let state = self.state.lock().unwrap();
        let waited = self.changed.wait_timeout_while(state, TIMEOUT, |state| !state.has_command);
        assert!(!waited.unwrap().1.timed_out(), "no queue is reset");
    }
}

impl DmaDevice for HeldDevice {
    fn name(&self) -> &str {
        "held"
    }

    fn read(&self, at: usize, width: Width) -> u64 {
        if at == registers::CMDSTS {
            let mut state = self.state.lock().unwrap();
            state.has_command |= state.is_held;
            self.changed.notify_all();
            drop(self.changed.wait_while(state, |state| state.is_held).unwrap());
        }
        self.model.read(at, width)
    }

    fn register_bytes(&self) -> usize {
        self.model.register_bytes()
    }

    unsafe fn write(&self, at: usize, width: Width, value: u64) {
        // SAFETY: the caller's guarantee.
        unsafe { self.model.write(at, width, value) };
    }

    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        // SAFETY: the caller's guarantee.
        unsafe { self.model.map(start, pages, direction) }
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        // SAFETY: the caller's guarantee.
        unsafe { self.model.unmap(pages) };
    }

    fn is_contiguous(&self) -> bool {
        self.model.is_contiguous()
    }

    fn reset(&self) -> io::Result<()> {
        self.model.reset()
    }
}

#[test]
fn a_submission_does_not_wait_for_the_reset_of_another_queue() {
    let model = DsaModel::new();
    let (state, changed) = (Mutex::default(), Condvar::new());
    let device = Arc::new(HeldDevice { model: model.clone(), state, changed });
    let devices: [DeviceWithPortals; 1] = [(device.clone(), model.portals())];
    // SAFETY: a device that forwards to a model; no other code writes its registers.
    let engine = Arc::new(unsafe { DsaEngine::over(&devices) }.unwrap());
    let (first, second) = (DsaRig::new(engine.clone()), DsaRig::new(engine));
    model.set_faults(DsaFaults { stalls: FaultSchedule::At(1), ..DsaFaults::default() });
    let (stalled, finished) = first.copy(0, 4096);
    first.submit(vec![stalled]);
    device.set_held(true);
    let (copy, copied) = second.copy(8192, 4096);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        let (recovering, submitting) = (first.channel.clone(), second.channel.clone());
        scope.spawn(move || assert!(recovering.park(1, TIMEOUT), "the queue is recovered"));
        device.wait_for_command();
        scope.spawn(move || tell.send(submitting.submit(&mut [Some(copy)]).unwrap().count));
        let submitted = told.recv_timeout(TIMEOUT);
        device.set_held(false);
        assert_eq!(submitted, Ok(1), "the submission waits for the command");
    });
    second.finish();
    assert!(matches!(finished.outcome(), Some(Ok(_))) && first.is_copied(0, 4096));
    assert!(matches!(copied.outcome(), Some(Ok(_))) && second.is_copied(8192, 4096));
    drop((first, second));
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}
