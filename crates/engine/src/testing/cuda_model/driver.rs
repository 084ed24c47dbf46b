//! The calls of the driver.

use std::sync::{Arc, PoisonError};

use memferry_memory::pinning::PageRange;
use memferry_sys::cuda::{
    CudaDeviceInfo, CudaDriver, CudaEvent, CudaStream, DriverError, MemcpyKind, code,
};
use memferry_sys::pages::ReservedRange;
use memferry_sys::sync::lock;
use memferry_sys::{Pages, residency};

use super::state::Allocation;
use super::streams::{StreamCommand, StreamQueue, StreamThread};
use super::{CudaModel, error};

// SAFETY: a stream is one thread that executes its commands in order, and an event is reached when
// its command is executed.
unsafe impl CudaDriver for CudaModel {
    fn info(&self) -> &CudaDeviceInfo {
        &self.info
    }

    fn make_current(&self) -> Result<(), DriverError> {
        Ok(())
    }

    fn with_current(&self, work: &mut dyn FnMut()) -> Result<(), DriverError> {
        work();
        Ok(())
    }

    fn memory(&self) -> Result<(usize, usize), DriverError> {
        let total = self.shared.faults.max_device_bytes.unwrap_or(1 << 30);
        let allocated = self.stats().device_bytes as usize;
        Ok((total.saturating_sub(allocated), total))
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DriverError> {
        self.check("allocate")?;
        let none = error("allocate", code::OUT_OF_MEMORY);
        if self.memory()?.0 < bytes || bytes == 0 {
            return Err(none);
        }
        let addresses = ReservedRange::new(bytes).map_err(|_| none)?;
        let contents = Pages::new(bytes).map_err(|_| none)?;
        let address = addresses.address() as u64;
        let allocation = Allocation { bytes, _addresses: addresses, contents };
        lock(&self.shared.state).allocations.insert(address, allocation);
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        let mut state = lock(&self.shared.state);
        let Some(allocation) = state.allocations.remove(&address) else { return };
        let start = allocation.contents.as_ptr() as u64;
        let end = start + allocation.bytes as u64;
        let is_in_flight =
            state.in_flight_inside.iter().any(|(from, to)| *from < end && start < *to);
        if is_in_flight {
            state.stats.unregistered_in_flight += 1;
            // The copy continues: it must not write to the next user of the memory.
            std::mem::forget(allocation);
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<u64, DriverError> {
        self.check("allocate_pinned")?;
        let none = error("allocate_pinned", code::OUT_OF_MEMORY);
        if self.shared.faults.no_pinned_memory {
            return Err(none);
        }
        let pages = Pages::new(bytes).map_err(|_| none)?;
        let address = pages.as_ptr() as u64;
        lock(&self.shared.state).pinned.insert(address, pages);
        Ok(address)
    }

    unsafe fn free_pinned(&self, address: u64) {
        lock(&self.shared.state).pinned.remove(&address);
    }

    fn register(&self, address: usize, bytes: usize, read_only: bool) -> Result<(), DriverError> {
        self.check("register")?;
        let mut state = lock(&self.shared.state);
        state.registration_calls += 1;
        let calls = state.registration_calls;
        let rejected = self.shared.faults.refuses_registrations;
        if rejected.is_some_and(|every| calls.is_multiple_of(every)) {
            return Err(error("register", code::NOT_SUPPORTED));
        }
        // Registering prefaults pages, as pinning does. Whole pages are pinned; bytes are
        // registered.
        let populate = match read_only {
            true => residency::populate_read,
            false => residency::populate_write,
        };
        let pages = PageRange::covering(address, bytes);
        if !pages.is_ok_and(|pages| populate(pages.start(), pages.bytes()).is_ok()) {
            return Err(error("register", code::INVALID_VALUE));
        }
        if state.overlaps_registered(address, address + bytes) {
            return Err(error("register", code::ALREADY_REGISTERED));
        }
        state.registered.insert(address, (address + bytes, !read_only));
        state.stats.registrations += 1;
        Ok(())
    }

    unsafe fn unregister(&self, address: usize) -> Result<(), DriverError> {
        let mut state = lock(&self.shared.state);
        let removed = state.registered.remove(&address);
        let (end, _) = removed.ok_or(error("unregister", code::INVALID_VALUE))?;
        let in_flight = state.in_flight.iter().filter(|(from, to)| *from < end && address < *to);
        let in_flight = in_flight.count() as u64;
        state.stats.unregistered_in_flight += in_flight;
        state.stats.unregistrations += 1;
        Ok(())
    }

    fn is_device(&self, address: u64) -> Option<bool> {
        let mut state = lock(&self.shared.state);
        if state.contents(address, 1).is_some() {
            return Some(true);
        }
        state.is_registered(address, 1, false).then_some(false)
    }

    fn can_access(&self, address: u64) -> bool {
        let mut state = lock(&self.shared.state);
        state.contents(address, 1).is_some() || state.is_registered(address, 1, false)
    }

    fn create_stream(&self) -> Result<CudaStream, DriverError> {
        self.check("create_stream")?;
        let id = lock(&self.shared.state).next_id();
        let queue = Arc::new(StreamQueue::default());
        let (shared, own_queue) = (self.shared.clone(), queue.clone());
        let thread = std::thread::Builder::new()
            .name(format!("model-stream-{id}"))
            .spawn(move || shared.run(&own_queue))
            .map_err(|_| error("create_stream", code::OUT_OF_MEMORY))?;
        lock(&self.streams).insert(id, StreamThread { queue, thread: Some(thread) });
        // SAFETY: the id of a stream that was created above.
        Ok(unsafe { CudaStream::from_raw(id) })
    }

    fn destroy_stream(&self, stream: CudaStream) {
        let queue = lock(&self.streams).remove(&stream.raw());
        drop(queue);
    }

    fn create_event(&self) -> Result<CudaEvent, DriverError> {
        self.check("create_event")?;
        let mut state = lock(&self.shared.state);
        let id = state.next_id();
        state.events.insert(id, (0, 0));
        // SAFETY: the id of an event that was created above.
        Ok(unsafe { CudaEvent::from_raw(id) })
    }

    fn destroy_event(&self, event: CudaEvent) {
        lock(&self.shared.state).events.remove(&event.raw());
    }

    unsafe fn copy(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError> {
        self.check("copy")?;
        let command = {
            let mut state = lock(&self.shared.state);
            state.copy_calls += 1;
            if self.shared.faults.refused_copy == Some(state.copy_calls) {
                return Err(error("copy", code::NOT_SUPPORTED));
            }
            let (host, writes) = match kind {
                MemcpyKind::HostToDevice => (Some(source), false),
                MemcpyKind::DeviceToHost => (Some(target), true),
                MemcpyKind::DeviceToDevice => (None, false),
            };
            if let Some(address) = host
                && !state.is_registered(address, bytes, writes)
            {
                state.stats.outside_registration += 1;
                return Err(error("copy", code::INVALID_VALUE));
            }
            let host = host.map(|address| (address as usize, address as usize + bytes));
            let (source, target) = state.model_addresses(kind, source, target, bytes)?;
            state.in_flight.extend(host);
            let inside = match kind {
                MemcpyKind::HostToDevice => [Some(target), None],
                MemcpyKind::DeviceToHost => [Some(source), None],
                MemcpyKind::DeviceToDevice => [Some(source), Some(target)],
            };
            let inside = inside.map(|at| at.map(|at| (at, at + bytes as u64)));
            state.in_flight_inside.extend(inside.into_iter().flatten());
            StreamCommand::Copy { source, target, bytes, host, inside }
        };
        self.enqueue(stream, command)
    }

    unsafe fn copy_sync(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
        _stream: CudaStream,
    ) -> Result<(), DriverError> {
        self.check("copy_sync")?;
        let mut state = lock(&self.shared.state);
        let host = match kind {
            MemcpyKind::HostToDevice => Some(source),
            MemcpyKind::DeviceToHost => Some(target),
            MemcpyKind::DeviceToDevice => None,
        };
        if host.is_some_and(|address| state.crosses_registration(address, bytes)) {
            return Err(error("copy_sync", code::INVALID_VALUE));
        }
        let (source, target) = state.model_addresses(kind, source, target, bytes)?;
        state.stats.copies += 1;
        // SAFETY: the caller guarantees host memory; device memory was checked.
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn fill(
        &self,
        target: u64,
        value: u8,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError> {
        self.check("fill")?;
        let target = lock(&self.shared.state).model_address(target, bytes)?;
        self.enqueue(stream, StreamCommand::Fill { target, value, bytes })
    }

    fn record_event(&self, event: CudaEvent, stream: CudaStream) -> Result<(), DriverError> {
        self.check("record")?;
        let generation = {
            let mut state = lock(&self.shared.state);
            let known = state.events.get_mut(&event.raw());
            let (recorded, _) = known.ok_or(error("record", code::INVALID_VALUE))?;
            *recorded += 1;
            *recorded
        };
        self.enqueue(stream, StreamCommand::Record { event: event.raw(), generation })
    }

    fn stream_wait_event(&self, stream: CudaStream, event: CudaEvent) -> Result<(), DriverError> {
        self.check("stream_wait_event")?;
        let generation = {
            let state = lock(&self.shared.state);
            state.events.get(&event.raw()).ok_or(error("stream_wait_event", code::INVALID_VALUE))?.0
        };
        self.enqueue(stream, StreamCommand::WaitEvent { event: event.raw(), generation })
    }

    fn synchronize(&self, stream: CudaStream) {
        let streams = lock(&self.streams);
        let Some(queue) = streams.get(&stream.raw()).map(|stream| stream.queue.clone()) else {
            return;
        };
        drop(streams);
        let mut state = lock(&queue.state);
        while state.is_busy || !state.commands.is_empty() {
            state = queue.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_complete(&self, event: CudaEvent) -> Result<bool, DriverError> {
        self.check("is_complete")?;
        let state = lock(&self.shared.state);
        let (recorded, reached) =
            state.events.get(&event.raw()).ok_or(error("is_complete", code::INVALID_VALUE))?;
        Ok(reached >= recorded)
    }
}
