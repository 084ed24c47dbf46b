//! The registers, tables and queues of the model, and the effects of commands.

mod arrivals;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use memferry_sys::portal::{PORTAL_LINES, PortalWords};
use memferry_sys::sync::lock;

use super::portals::ModelPortals;
use super::{DsaModelBuilder, DsaModelCounters};
use crate::dsa::registers::{self as r, DsaCommand, DsaState, QueueConfig, command_error};

/// The number of reads of the command status until a command is done.
const COMMAND_POLLS: u32 = 2;

/// The number of words of 32 bits of an entry of the queue table, with its opcodes.
pub(super) const QUEUE_WORDS: usize = 16;

/// The state of the device. Its threads execute descriptors without the lock. A driver stores to the
/// portals without it, too: who has it takes the descriptors out of them.
#[derive(Debug)]
pub(super) struct DsaModelState {
    device: Mutex<DeviceState>,
    pub(super) portals: ModelPortals,
    /// The device is removed: descriptors are lost.
    pub(super) is_removed: AtomicBool,
    /// Notified when there is work, and when running work is cancelled.
    doorbell: Condvar,
    /// Notified when a thread has stopped working.
    stopped: Condvar,
    /// The number of changes that the threads must look at.
    changes: CachePadded<AtomicU64>,
    /// The number of threads that sleep until there is work; changed with the lock.
    sleepers: CachePadded<AtomicUsize>,
    /// Whether the threads poll for work and through delays, and nobody wakes them. In a line of its own:
    /// they read it while they poll, and others write to the rest.
    is_polling: CachePadded<bool>,
}

#[derive(Debug)]
pub(super) struct DeviceState {
    pub(super) state: DsaState,
    /// The entries of the group table: four words of queues, the engines, the flags.
    pub(super) groups: Vec<[u64; 6]>,
    pub(super) queues: Vec<ModelQueue>,
    pub(super) software_error: u64,
    pub(super) control: u32,
    command_status: u32,
    /// The reads until the command is done; `None` for one that never is.
    command_polls: Option<u32>,
    is_closed: bool,
    /// What was wrong with stores to portals.
    violations: Vec<String>,
}

#[derive(Debug)]
pub(super) struct ModelQueue {
    pub(super) words: [u32; QUEUE_WORDS],
    pub(super) is_enabled: bool,
    is_stalled: bool,
    /// A descriptor leaves its place when an engine takes it, before its record is written.
    pending: VecDeque<PortalWords>,
    pub(super) running: usize,
    /// Counts events that cancel the work of the queue: the result of a step of an earlier epoch is
    /// dropped.
    epoch: u64,
    pub(super) counters: DsaModelCounters,
}

impl ModelQueue {
    fn new() -> Self {
        Self {
            words: [0; QUEUE_WORDS],
            is_enabled: false,
            is_stalled: false,
            pending: VecDeque::new(),
            running: 0,
            epoch: 0,
            counters: DsaModelCounters::default(),
        }
    }

    pub(super) fn config(&self) -> QueueConfig {
        QueueConfig::of(std::array::from_fn(|word| self.words[word]))
    }

    /// The opcodes that the queue may execute, if that is configured.
    fn opcodes(&self) -> u64 {
        let at = r::QUEUE_OPCODES / 4;
        u64::from(self.words[at]) | u64::from(self.words[at + 1]) << 32
    }

    fn is_drained(&self) -> bool {
        self.pending.is_empty() && self.running == 0
    }

    fn cancel(&mut self) {
        self.epoch += 1;
        self.pending.clear();
        (self.is_enabled, self.is_stalled) = (false, false);
        self.words = [0; QUEUE_WORDS];
    }
}

/// One step of a thread: a descriptor to execute.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelStep {
    pub(super) queue: usize,
    pub(super) words: PortalWords,
    pub(super) config: QueueConfig,
    /// The opcodes that the queue is configured for.
    pub(super) opcodes: u64,
    epoch: u64,
}

impl DsaModelState {
    pub(super) fn new(queues: usize, groups: usize, is_polling: bool) -> Self {
        let device = DeviceState {
            state: DsaState::Disabled,
            groups: vec![[0; 6]; groups],
            queues: (0..queues).map(|_| ModelQueue::new()).collect(),
            software_error: 0,
            control: 0,
            command_status: 0,
            command_polls: Some(0),
            is_closed: false,
            violations: Vec::new(),
        };
        Self {
            device: Mutex::new(device),
            portals: ModelPortals::new(queues).expect("memory for the portals of the model"),
            is_removed: AtomicBool::new(false),
            doorbell: Condvar::new(),
            stopped: Condvar::new(),
            changes: CachePadded::default(),
            sleepers: CachePadded::default(),
            is_polling: is_polling.into(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, DeviceState> {
        lock(&self.device)
    }

    /// Ends the threads.
    pub(super) fn close(&self) {
        let mut device = self.lock();
        device.is_closed = true;
        device.queues.iter_mut().for_each(|queue| queue.epoch += 1);
        self.notify();
    }

    /// Waits for the next step; `None` when the model is closed. Every thread begins its search at
    /// another queue.
    pub(super) fn next_step(&self, thread: usize) -> Option<ModelStep> {
        let mut device = self.lock();
        while !device.is_closed {
            // Read with the lock: a change after this look has a higher number.
            let seen = self.changes.load(Ordering::Acquire);
            self.take_next_stores(&mut device);
            let step = device.take_step(thread).or_else(|| {
                self.take_stores(&mut device);
                device.take_step(thread)
            });
            if step.is_some() {
                return step;
            }
            device = self.wait(device, seen);
        }
        None
    }

    /// Whether a step is still wanted.
    pub(super) fn is_wanted(&self, step: &ModelStep) -> bool {
        let device = self.lock();
        device.queues[step.queue].epoch == step.epoch && device.state == DsaState::Enabled
    }

    /// Delays a step; returns whether it is still wanted.
    pub(super) fn pause(&self, step: &ModelStep, delay: Duration) -> bool {
        let until = Instant::now() + delay;
        let mut device = self.lock();
        while device.queues[step.queue].epoch == step.epoch {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            if *self.is_polling {
                // Read with the lock: a cancellation after this look has a higher number.
                let seen = self.changes.load(Ordering::Acquire);
                drop(device);
                while self.changes.load(Ordering::Acquire) == seen && Instant::now() < until {
                    std::hint::spin_loop();
                }
                device = self.lock();
            } else {
                let waited = self.doorbell.wait_timeout(device, left);
                device = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        false
    }

    /// Ends a step.
    pub(super) fn end_step(&self, step: &ModelStep, then: impl FnOnce(&mut DeviceState)) {
        let mut device = self.lock();
        then(&mut device);
        device.queues[step.queue].running -= 1;
        self.stopped.notify_all();
    }

    /// Cancels the work of some queues and waits until the device accesses no memory for them.
    fn stop<'a>(
        &'a self,
        mut device: MutexGuard<'a, DeviceState>,
        queues: std::ops::Range<usize>,
    ) -> MutexGuard<'a, DeviceState> {
        device.queues[queues.clone()].iter_mut().for_each(ModelQueue::cancel);
        self.notify();
        while device.queues[queues.clone()].iter().any(|queue| queue.running > 0) {
            device = self.stopped.wait(device).unwrap_or_else(PoisonError::into_inner);
        }
        device
    }

    /// Waits until a queue has executed everything, unless it has stopped, and then cancels it.
    pub(super) fn drain(&self, queue: usize) {
        let mut device = self.lock_after_stores();
        while !device.queues[queue].is_drained()
            && !device.queues[queue].is_stalled
            && device.state == DsaState::Enabled
        {
            device = self.stopped.wait(device).unwrap_or_else(PoisonError::into_inner);
        }
        let words = device.queues[queue].words;
        let mut device = self.stop(device, queue..queue + 1);
        // The kernel's configuration stays.
        device.queues[queue].words = words;
        device.queues[queue].is_enabled = true;
    }

    /// Sets the power-on state.
    pub(super) fn power_on(&self) {
        let device = self.lock_after_stores();
        let count = device.queues.len();
        let mut device = self.stop(device, 0..count);
        device.state = DsaState::Disabled;
        device.groups.iter_mut().for_each(|group| *group = [0; 6]);
        (device.software_error, device.control) = (0, 0);
        (device.command_status, device.command_polls) = (0, Some(0));
    }

    /// Reads the status of the command. Each read advances it.
    pub(super) fn command_status(&self) -> u32 {
        let mut device = self.lock();
        match &mut device.command_polls {
            Some(0) => device.command_status,
            Some(polls) => {
                *polls -= 1;
                r::CMDSTS_ACTIVE
            }
            None => r::CMDSTS_ACTIVE,
        }
    }

    /// Runs a command; or returns the violation.
    pub(super) fn command(
        &self,
        options: &DsaModelBuilder,
        value: u32,
        enable_error: u32,
        refuses_reset: impl FnOnce() -> bool,
    ) -> Result<(), String> {
        let mut device = self.lock_after_stores();
        if device.command_polls != Some(0) {
            return Err(format!("command {value:#x} was written during another"));
        }
        device.command_polls = Some(COMMAND_POLLS);
        device.command_status = 0;
        let command = DsaCommand::of(value);
        let is_reset = matches!(command, Some(DsaCommand::ResetDevice | DsaCommand::ResetQueue(_)));
        if is_reset && refuses_reset() {
            device.command_polls = None;
            return Ok(());
        }
        let result = match command {
            None => Err(command_error::COMMAND),
            Some(DsaCommand::EnableDevice) => device.enable(options),
            Some(DsaCommand::ResetDevice) => {
                drop(device);
                self.power_on();
                device = self.lock();
                device.command_polls = Some(COMMAND_POLLS);
                Ok(())
            }
            Some(DsaCommand::EnableQueue(_)) if enable_error != 0 => {
                device.command_status = enable_error;
                return Ok(());
            }
            Some(DsaCommand::EnableQueue(queue)) => {
                let enabled = device.enable_queue(options, queue);
                enabled.inspect(|()| self.portals.restart(queue))
            }
            Some(DsaCommand::ResetQueue(queue)) => match device.queues.get(queue) {
                None => Err(command_error::QUEUE_NUMBER),
                Some(_) if device.state != DsaState::Enabled => Err(command_error::DEVICE_DISABLED),
                Some(_) => {
                    device = self.stop(device, queue..queue + 1);
                    Ok(())
                }
            },
        };
        result.map_err(|code| {
            device.command_status = code;
            format!("command {value:#x} failed: {}", r::command_reason(code))
        })
    }
}

impl DeviceState {
    fn take_step(&mut self, thread: usize) -> Option<ModelStep> {
        if self.state != DsaState::Enabled {
            return None;
        }
        let count = self.queues.len();
        let candidates = (0..count).map(|offset| (offset + thread) % count);
        let ready = |&queue: &usize| {
            !self.queues[queue].is_stalled && !self.queues[queue].pending.is_empty()
        };
        let queue = candidates.into_iter().find(ready)?;
        let found = &mut self.queues[queue];
        let words = found.pending.pop_front()?;
        found.running += 1;
        let (config, opcodes, epoch) = (found.config(), found.opcodes(), found.epoch);
        Some(ModelStep { queue, words, config, opcodes, epoch })
    }

    /// Stops the whole device.
    pub(super) fn halt(&mut self) {
        self.state = DsaState::Halted;
    }

    /// Stops a queue without a report.
    pub(super) fn stall(&mut self, step: &ModelStep) {
        let queue = &mut self.queues[step.queue];
        if queue.epoch == step.epoch {
            queue.is_stalled = true;
            queue.counters.stalls += 1;
        }
    }

    fn enable(&mut self, options: &DsaModelBuilder) -> Result<(), u32> {
        if self.state != DsaState::Disabled {
            return Err(command_error::DEVICE_ENABLED);
        }
        let (mut queues_seen, engines_seen) = ([0u64; 4], self.groups.iter().map(|group| group[4]));
        if engines_seen.fold(0, |a, b| a | b) >> options.engines != 0 {
            return Err(command_error::GROUP);
        }
        for group in &self.groups {
            let has_queues = group[..4].iter().any(|word| *word != 0);
            if has_queues != (group[4] != 0) {
                return Err(command_error::GROUP);
            }
            for (seen, word) in queues_seen.iter_mut().zip(&group[..4]) {
                if *seen & word != 0 {
                    return Err(command_error::QUEUE_GROUPS);
                }
                *seen |= word;
            }
        }
        let total: u32 = self.queues.iter().map(|queue| u32::from(queue.config().size)).sum();
        if total > options.total_size {
            return Err(command_error::TOTAL_SIZE);
        }
        self.state = DsaState::Enabled;
        Ok(())
    }

    fn enable_queue(&mut self, options: &DsaModelBuilder, queue: usize) -> Result<(), u32> {
        let in_group =
            |group: &[u64; 6]| group.get(queue / 64).is_some_and(|w| w >> (queue % 64) & 1 != 0);
        let is_grouped = self.groups.iter().any(in_group);
        let state = self.state;
        let found = self.queues.get_mut(queue).ok_or(command_error::QUEUE_NUMBER)?;
        let config = found.config();
        let error = if state != DsaState::Enabled {
            command_error::DEVICE_DISABLED
        } else if found.is_enabled {
            command_error::QUEUE_ENABLED
        } else if config.size == 0 || usize::from(config.size) > PORTAL_LINES || !is_grouped {
            command_error::QUEUE_SIZE
        } else if config.priority == 0 {
            command_error::QUEUE_PRIORITY
        } else if !config.is_dedicated {
            // A shared queue needs the address space of a process.
            command_error::QUEUE_MODE
        } else if config.block_on_fault && !options.block_on_fault {
            command_error::BLOCK_ON_FAULT
        } else if config.batch_shift > options.batch_shift {
            command_error::BATCH_SIZE
        } else if config.transfer_shift > options.transfer_shift {
            command_error::TRANSFER_SIZE
        } else {
            found.is_enabled = true;
            return Ok(());
        };
        Err(error)
    }
}
