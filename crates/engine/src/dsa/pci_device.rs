//! A device that this process controls through its registers: it is reset, its groups and queues
//! are configured, and it is enabled; then each channel enables a dedicated queue of its own.
//!
//! A submission holds the state for reading, a command for writing. So no descriptor is submitted
//! while a queue is reset, and after a reset of the device every queue finds out before it submits
//! again. Submissions do not wait for a command: they find the queue full.

use std::io;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::Duration;

use memferry_memory::dma_mappings::DmaMappings;
use memferry_sys::EventFd;
use memferry_sys::device::DmaDevice;
use memferry_sys::portal::{self, PORTAL_LINES, PORTAL_STRIDE, Portal, PortalWords};

use super::record::status_reason;
use super::registers::{self as r, DsaCommand, DsaState, QueueConfig};
use super::work_queue::{FaultResolution, QueueCheck, QueueLimits, QueueStop, WorkQueue};
use crate::contract::PinnedLocation;
use crate::pci::{ChannelSlot, CoherentMemory, poll_until};

/// The maximum length of a descriptor, as a power of two: longer ones are not faster, and would
/// exceed the stall timeout of a queue.
const MAX_TRANSFER_SHIFT: u32 = 21;
/// The maximum length of a batch, as a power of two.
const MAX_BATCH_SHIFT: u32 = 6;

const BROKEN: &str = "the accelerator has failed";

/// The device.
#[derive(Debug)]
pub(super) struct DsaPciDevice {
    device: Arc<dyn DmaDevice>,
    portals: Arc<Portal>,
    tables: DeviceTables,
    limits: QueueLimits,
    pages: Arc<DmaMappings>,
    /// Vector 0 is the device's, the others are those of the queues; none if there are no interrupts.
    interrupts: Vec<Arc<EventFd>>,
    state: RwLock<DsaPciState>,
}

#[derive(Debug)]
struct DsaPciState {
    /// The number of resets of the whole device.
    resets: u64,
    /// The queues that channels use.
    enabled: Box<[bool]>,
    is_broken: bool,
}

/// Where the tables are, and what is written to them.
#[derive(Debug, Clone, Copy)]
struct DeviceTables {
    groups_at: usize,
    groups: usize,
    engines: usize,
    queues_at: usize,
    queues: usize,
    entry_bytes: usize,
    config: QueueConfig,
    /// The flags of the group.
    group_flags: u64,
    /// The opcodes that queues may execute, where that is configured.
    opcodes: Option<[u64; OPCODE_WORDS]>,
}

/// The number of words of 64 bits of a set of opcodes.
const OPCODE_WORDS: usize = 4;

impl DsaPciDevice {
    /// Resets the device and reads what it can do. It is configured when memory is mapped for it.
    pub(super) fn new(
        device: Arc<dyn DmaDevice>,
        portals: Arc<Portal>,
        pages: Arc<DmaMappings>,
    ) -> io::Result<Self> {
        let (tables, limits) = read_capabilities(&*device)?;
        let state = DsaPciState {
            resets: 0,
            enabled: vec![false; tables.queues].into_boxed_slice(),
            is_broken: false,
        };
        let interrupts = connect_interrupts(&*device, tables.queues);
        let state = RwLock::new(state);
        let found = Self { device, portals, tables, limits, pages, interrupts, state };
        // Stopped before any memory is mapped: the previous user may have left the device running,
        // on addresses that are allocated again.
        found.command(DsaCommand::ResetDevice).or_else(|_| found.device.reset())?;
        found.configure()?;
        Ok(found)
    }

    /// The number of queues.
    pub(super) fn queues(&self) -> usize {
        self.tables.queues
    }

    /// The limits of each queue.
    pub(super) fn limits(&self) -> QueueLimits {
        self.limits
    }

    /// Whether queues have interrupts.
    pub(super) fn has_interrupts(&self) -> bool {
        self.interrupts.len() > 1
    }

    /// The name for display.
    pub(super) fn name(&self) -> &str {
        self.device.name()
    }

    /// The state; `None` while a command runs, which may take seconds. Nobody who submits waits for
    /// that.
    fn try_read_state(&self) -> Option<RwLockReadGuard<'_, DsaPciState>> {
        match self.state.try_read() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn write_state(&self) -> RwLockWriteGuard<'_, DsaPciState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn write32(&self, at: usize, value: u32) {
        // SAFETY: the device is this engine's alone (guaranteed to `DsaEngine::over`). The
        // registers and tables that are written here name no memory; descriptors do.
        unsafe { self.device.write32(at, value) };
    }

    fn write64(&self, at: usize, value: u64) {
        // SAFETY: as above.
        unsafe { self.device.write64(at, value) };
    }

    /// Runs a command and waits for its end. Commands are serialized by the lock of the state.
    fn command(&self, command: DsaCommand) -> io::Result<()> {
        let status = || self.device.read32(r::CMDSTS);
        let is_done = || status() & r::CMDSTS_ACTIVE == 0;
        let timeout = self.device.patience();
        if !poll_until(timeout, is_done) {
            return Err(io::Error::other("the device is busy with an earlier command"));
        }
        self.write32(r::CMD, command.value());
        if !poll_until(timeout, is_done) {
            return Err(io::Error::other("the device does not finish a command"));
        }
        match status() & r::CMDSTS_ERROR {
            0 => Ok(()),
            code => Err(io::Error::other(r::command_reason(code))),
        }
    }

    fn device_state(&self) -> Option<DsaState> {
        DsaState::of(self.device.read32(r::GENSTS))
    }

    /// Writes the tables and enables the device: one group with all engines and all queues.
    fn configure(&self) -> io::Result<()> {
        let DeviceTables { groups_at, groups, engines, group_flags, queues, .. } = self.tables;
        for group in 0..groups {
            let at = groups_at + group * r::GROUP_BYTES;
            let is_used = group == 0;
            let set = |count: usize| if is_used { u64::MAX >> (64 - count) } else { 0 };
            self.write64(at, set(queues));
            (1..4).for_each(|word| self.write64(at + 8 * word, 0));
            self.write64(at + r::GROUP_ENGINES, set(engines));
            self.write64(at + r::GROUP_FLAGS, if is_used { group_flags } else { 0 });
        }
        (0..queues).for_each(|queue| self.configure_queue(queue));
        self.command(DsaCommand::EnableDevice)?;
        match self.device_state() {
            Some(DsaState::Enabled) => Ok(()),
            _ => Err(io::Error::other("the device does not start")),
        }
    }

    fn configure_queue(&self, queue: usize) {
        let at = self.tables.queues_at + queue * self.tables.entry_bytes;
        for (word, value) in self.tables.config.words().into_iter().enumerate() {
            self.write32(at + 4 * word, value);
        }
        for (word, opcodes) in self.tables.opcodes.iter().flatten().enumerate() {
            let at = at + r::QUEUE_OPCODES + 8 * word;
            self.write32(at, *opcodes as u32);
            self.write32(at + 4, (opcodes >> 32) as u32);
        }
    }

    /// Enables a queue for a channel.
    pub(super) fn open_queue(
        self: &Arc<Self>,
        slot: ChannelSlot,
        queue: usize,
    ) -> io::Result<PciWorkQueue> {
        let mut state = self.write_state();
        if state.is_broken {
            return Err(io::Error::other(BROKEN));
        }
        self.command(DsaCommand::EnableQueue(queue))?;
        state.enabled[queue] = true;
        let resets = state.resets;
        drop(state);
        Ok(PciWorkQueue { device: self.clone(), queue, resets, stores: 0, _slot: slot })
    }

    /// Aborts the descriptors of a queue and disables it. If the device does not do that, the whole
    /// device is reset.
    fn stop_queue(&self, state: &mut DsaPciState, queue: usize) {
        if state.is_broken {
            return;
        }
        let is_running = self.device_state() == Some(DsaState::Enabled);
        state.enabled[queue] = false;
        if is_running && self.command(DsaCommand::ResetQueue(queue)).is_ok() {
            self.configure_queue(queue);
            return;
        }
        state.resets += 1;
        let reset = self.command(DsaCommand::ResetDevice).or_else(|_| self.device.reset());
        let is_stopped = reset.is_ok();
        let enable = |(queue, is_enabled): (usize, &bool)| match is_enabled {
            true => self.command(DsaCommand::EnableQueue(queue)),
            false => Ok(()),
        };
        let restarted = reset
            .and_then(|()| self.configure())
            .and_then(|()| state.enabled.iter().enumerate().try_for_each(enable));
        if let Err(error) = restarted {
            tracing::warn!(
                device = self.device.name(),
                %error,
                "disabling an accelerator that cannot be restarted"
            );
            state.is_broken = true;
            if !is_stopped {
                // The device may still write, so it loses its access to the memory.
                self.pages.revoke_access();
            }
        }
    }
}

/// A dedicated queue of a device. The drop stops it.
#[derive(Debug)]
pub(super) struct PciWorkQueue {
    device: Arc<DsaPciDevice>,
    queue: usize,
    /// The resets of the device when the queue was enabled.
    resets: u64,
    /// The number of writes to the portal since the queue was enabled: its lines are used in turn.
    stores: usize,
    /// Dropped last: another queue may use the number only after this one is stopped.
    _slot: ChannelSlot,
}

// SAFETY: a queue that is restarted or dropped was reset, which aborts its descriptors; or the
// device was reset; or the device has lost its access to all memory.
unsafe impl WorkQueue for PciWorkQueue {
    fn limits(&self) -> QueueLimits {
        self.device.limits
    }

    fn allocate(&self, bytes: usize) -> io::Result<CoherentMemory> {
        CoherentMemory::new(self.device.device.clone(), bytes)
    }

    fn address(
        &self,
        pinned: Option<PinnedLocation<'_>>,
        _address: u64,
        length: u64,
    ) -> Option<u64> {
        if self.device.pages.is_revoked() {
            return None;
        }
        pinned?.contiguous(length)
    }

    unsafe fn submit(&mut self, descriptors: &[PortalWords]) -> Result<usize, QueueStop> {
        // During a command for another queue, this one has no space.
        let Some(state) = self.device.try_read_state() else { return Ok(0) };
        if state.is_broken {
            return Err(QueueStop::Failed(BROKEN));
        }
        if state.resets != self.resets {
            return Err(QueueStop::WasReset);
        }
        for descriptor in descriptors {
            let line = self.stores % PORTAL_LINES * PORTAL_STRIDE;
            self.stores = self.stores.wrapping_add(1);
            // SAFETY: the queue is this value's alone; the caller guarantees the descriptor.
            unsafe {
                self.device.portals.store(self.queue * r::PORTAL_BYTES + line, descriptor);
            }
        }
        // Before the lock is released: a command must not overtake the stores.
        portal::complete_stores();
        Ok(descriptors.len())
    }

    fn check(&mut self) -> Result<QueueCheck, QueueStop> {
        let Some(state) = self.device.try_read_state() else {
            return Ok(QueueCheck::Unknown);
        };
        if state.is_broken {
            return Err(QueueStop::Failed(BROKEN));
        }
        if state.resets != self.resets {
            return Err(QueueStop::WasReset);
        }
        match self.device.device_state() {
            Some(DsaState::Enabled) => (),
            Some(DsaState::Halted) => return Err(QueueStop::Failed("the accelerator halted")),
            Some(_) => return Err(QueueStop::Failed("the accelerator was disabled")),
            None => return Err(QueueStop::Failed("the accelerator does not respond")),
        }
        let error = self.device.device.read64(r::SWERR);
        let queue = (error >> r::SWERR_QUEUE_SHIFT) as u8;
        // An error that names no queue may be of this one, which makes no progress.
        let is_of_this = error & r::SWERR_QUEUE_VALID == 0 || usize::from(queue) == self.queue;
        if error & r::SWERR_VALID != 0 && is_of_this {
            self.device.write64(r::SWERR, r::SWERR_VALID | r::SWERR_OVERFLOW);
            return Err(QueueStop::Failed(status_reason((error >> r::SWERR_CODE_SHIFT) as u8)));
        }
        Ok(QueueCheck::Running)
    }

    fn restart(&mut self) -> bool {
        let mut state = self.device.write_state();
        if state.resets == self.resets {
            self.device.stop_queue(&mut state, self.queue);
            self.resets = state.resets;
            if state.is_broken {
                return false;
            }
            // Neither a reset of the queue nor one of the device enables this queue.
            if let Err(error) = self.device.command(DsaCommand::EnableQueue(self.queue)) {
                tracing::warn!(device = self.device.name(), %error, "a work queue does not restart");
                return false;
            }
            state.enabled[self.queue] = true;
        }
        (self.resets, self.stores) = (state.resets, 0);
        !state.is_broken
    }

    fn resolve_fault(&self, _address: u64, _is_write: bool, _bytes: u64) -> FaultResolution {
        FaultResolution::Unsupported
    }

    fn find_bad_memory(&self, _address: u64, _is_write: bool, _bytes: u64) -> Option<u64> {
        None
    }

    fn interrupt(&self) -> Option<(u16, Arc<EventFd>)> {
        let vector = self.queue + 1;
        let event = self.device.interrupts.get(vector)?;
        Some((u16::try_from(vector).ok()?, event.clone()))
    }

    fn patience(&self) -> Duration {
        self.device.device.patience()
    }
}

impl Drop for PciWorkQueue {
    fn drop(&mut self) {
        let mut state = self.device.write_state();
        if state.enabled[self.queue] {
            self.device.stop_queue(&mut state, self.queue);
        }
    }
}

/// Connects the vector of the device and one for each queue. Where handles of interrupts have to be
/// requested, as in a virtual machine, there are none.
fn connect_interrupts(device: &dyn DmaDevice, queues: usize) -> Vec<Arc<EventFd>> {
    let has_commands = device.read64(r::GENCAP) & r::GENCAP_COMMANDS != 0;
    if has_commands && device.read32(r::CMDCAP) & r::CMDCAP_REQUEST_INTERRUPT != 0 {
        return Vec::new();
    }
    device.connect_interrupts(queues + 1).unwrap_or_else(|error| {
        tracing::debug!(device = device.name(), %error, "no interrupts: waiters sleep by estimate");
        Vec::new()
    })
}

fn read_capabilities(device: &dyn DmaDevice) -> io::Result<(DeviceTables, QueueLimits)> {
    let device_error = |what: String| io::Error::other(format!("device {}: {what}", device.name()));
    let version = device.read32(r::VERSION);
    if version == u32::MAX {
        return Err(device_error("it does not respond".into()));
    }
    let general = r::GeneralCapabilities::of(device.read64(r::GENCAP));
    let queues = r::QueueCapabilities::of(device.read64(r::WQCAP));
    let groups = r::GroupCapabilities::of(device.read64(r::GRPCAP));
    let engines = usize::from(device.read64(r::ENGCAP) as u8);
    let offsets = device.read64(r::OFFSETS);
    if !general.is_configurable {
        let fix = "it has a fixed configuration: use its queues through the kernel's idxd driver";
        return Err(device_error(fix.into()));
    }
    if !queues.dedicated {
        return Err(device_error("it has no dedicated queues".into()));
    }
    let count = queues.queues.min(queues.total_size as usize).min(64);
    if count == 0 || engines == 0 || engines > 64 || groups.groups == 0 {
        return Err(device_error(format!(
            "it reports {count} queues, {engines} engines and {} groups",
            groups.groups
        )));
    }
    let size = (queues.total_size as usize / count).min(usize::from(u16::MAX));
    let config = QueueConfig {
        size: size as u16,
        is_dedicated: true,
        block_on_fault: false,
        priority: 1,
        transfer_shift: general.transfer_shift.min(MAX_TRANSFER_SHIFT),
        batch_shift: general.batch_shift.min(MAX_BATCH_SHIFT),
    };
    let opcode_words = std::array::from_fn(|word| device.read64(r::OPCAP + 8 * word));
    let classes = if version <= r::TRAFFIC_CLASS_VERSION { r::GROUP_TRAFFIC_CLASSES } else { 0 };
    let tables = DeviceTables {
        groups_at: (offsets as u16) as usize * r::TABLE_UNIT,
        groups: groups.groups,
        engines,
        group_flags: u64::from(groups.read_buffers) << r::GROUP_READ_BUFFERS_SHIFT | classes,
        queues_at: ((offsets >> 16) as u16) as usize * r::TABLE_UNIT,
        queues: count,
        entry_bytes: queues.entry_bytes,
        config,
        opcodes: queues.op_config.then_some(opcode_words),
    };
    let groups_end = tables.groups_at + tables.groups * r::GROUP_BYTES;
    let queues_end = tables.queues_at + tables.queues * tables.entry_bytes;
    let needed =
        if queues.op_config { r::QUEUE_OPCODES + 8 * OPCODE_WORDS } else { r::QUEUE_OPCODES };
    if groups_end.max(queues_end) > device.register_bytes() || tables.entry_bytes < needed {
        return Err(device_error("its tables are not inside its registers".into()));
    }
    let [opcodes, ..] = opcode_words;
    let has_batches = opcodes & (1 << super::descriptor::opcode::BATCH) != 0;
    let limits = QueueLimits {
        size,
        max_bytes: 1 << config.transfer_shift,
        max_batch: if has_batches { 1 << config.batch_shift } else { 1 },
        opcodes,
        cache_control: general.cache_control,
    };
    Ok((tables, limits))
}
