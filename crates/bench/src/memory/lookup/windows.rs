//! Members that are processes: memory in windows, puts and gets through them, barriers by
//! notifications.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use memferry::message::window::RawMemory;
use memferry::message::{
    Endpoint, EndpointBuilder, Job, PutNotification, RemoteWindow, Rights, TAG_ALL, Window,
    WindowHandle,
};
use memferry_memory::lookup::LookupConfig;

use super::team::Team;
use crate::group::{Plain, bytes_of, bytes_of_mut};

/// Bytes of the header before the memory of the program: one notification variable for each member,
/// contiguous.
pub(super) const HEADER_BYTES: usize = 4096;
/// Maximum number of members that the header has variables for.
const MAX_MEMBERS: usize = HEADER_BYTES / 8;
const TAG: u64 = 1;
/// Timeout of a barrier.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(50);

/// One member over one endpoint.
pub(super) struct WindowMember {
    // Dropped, and thereby withdrawn, before the endpoint closes.
    window: Window<RawMemory>,
    /// Windows of the other members; `None` at this member's rank.
    remotes: Vec<Option<RemoteWindow>>,
    job: Job,
    /// Number of barriers so far, over all endpoints that share the memory.
    barriers: u64,
}

impl WindowMember {
    /// Opens an endpoint, joins the others, exposes the memory and attaches theirs.
    ///
    /// # Safety
    ///
    /// The memory must be valid until the member is dropped, longer than a header, and aligned to 8
    /// bytes.
    pub(super) unsafe fn join(
        name: &str,
        rank: usize,
        size: usize,
        settings: LookupConfig,
        memory: (*mut u8, usize),
    ) -> anyhow::Result<Self> {
        ensure!(size <= MAX_MEMBERS, "{size} members are too many");
        let job = EndpointBuilder::new().lookup(settings).join(name, rank, size)?;
        // SAFETY: the caller guarantees it.
        let window = unsafe { job.endpoint().expose_raw(memory.0, memory.1, Rights::READ_WRITE) }?;
        let handles = exchange(&job, &window.handle().to_bytes())?;
        let mut remotes = Vec::with_capacity(size);
        for (peer, handle) in handles.into_iter().enumerate() {
            if peer == rank {
                remotes.push(None);
                continue;
            }
            let bytes = handle.as_slice().try_into().context("a handle of another length")?;
            let handle = WindowHandle::from_bytes(bytes)?;
            remotes.push(Some(job.endpoint().attach(job.peer(peer), handle)?));
        }
        Ok(Self { window, remotes, job, barriers: 0 })
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        self.job.endpoint()
    }

    /// Window of another member.
    pub(super) fn remote(&self, rank: usize) -> anyhow::Result<&RemoteWindow> {
        self.remotes[rank].as_ref().context("one's own memory is not attached")
    }

    /// Bytes of attached windows.
    pub(super) fn attached_bytes(&self) -> u64 {
        self.remotes.iter().flatten().map(RemoteWindow::len).sum()
    }

    /// Continues the count of barriers of another endpoint over the same memory.
    pub(super) fn resume_barriers(&mut self, meetings: u64) {
        self.barriers = meetings;
    }

    pub(super) fn barriers(&self) -> u64 {
        self.barriers
    }
}

impl Team for WindowMember {
    fn rank(&self) -> usize {
        self.job.rank()
    }

    fn size(&self) -> usize {
        self.job.size()
    }

    fn own<T: Plain, R>(&mut self, work: impl FnOnce(&mut [T]) -> R) -> R {
        let count = (self.window.len() - HEADER_BYTES) / size_of::<T>();
        let first = self.window.as_ptr().wrapping_add(HEADER_BYTES).cast::<T>();
        // SAFETY: the window's memory after the header, which lives as long as self and is aligned
        // for all plain types. No other thread of this process uses it. Other processes use it as
        // barriers permit: none writes what this member reads until the next barrier.
        work(unsafe { std::slice::from_raw_parts_mut(first, count) })
    }

    fn get<T: Plain>(&mut self, rank: usize, place: usize, buffer: &mut [T]) -> anyhow::Result<()> {
        let offset = HEADER_BYTES + place * size_of::<T>();
        let bytes = bytes_of_mut(buffer);
        match &self.remotes[rank] {
            None => self.window.read(offset, bytes),
            Some(remote) => remote.get(offset as u64, bytes)?,
        }
        Ok(())
    }

    fn put<T: Plain>(&mut self, rank: usize, place: usize, data: &[T]) -> anyhow::Result<()> {
        let offset = HEADER_BYTES + place * size_of::<T>();
        let bytes = bytes_of(data);
        match &self.remotes[rank] {
            None => self.window.write(offset, bytes),
            Some(remote) => remote.put(offset as u64, bytes)?,
        }
        Ok(())
    }

    fn barrier(&mut self) -> anyhow::Result<()> {
        self.barriers += 1;
        let (own, meeting) = (self.job.rank(), self.barriers);
        for remote in self.remotes.iter().flatten() {
            remote.put_notify(
                0,
                &[],
                PutNotification { offset: 8 * own as u64, value: meeting },
            )?;
        }
        for peer in (0..self.remotes.len()).filter(|&peer| peer != own) {
            let came = self.window.wait(8 * peer, Some(BARRIER_TIMEOUT), |met| met >= meeting)?;
            if came.is_none() {
                bail!("member {peer} did not come to meeting {meeting}");
            }
        }
        Ok(())
    }

    fn gather(&mut self, words: &[u64]) -> anyhow::Result<Vec<Vec<u64>>> {
        let all = exchange(&self.job, bytes_of(words))?;
        let words = |bytes: Vec<u8>| {
            let word = |part: &[u8]| u64::from_ne_bytes(part.try_into().expect("eight bytes"));
            bytes.chunks_exact(8).map(word).collect()
        };
        Ok(all.into_iter().map(words).collect())
    }
}

/// Sends the same bytes to all members, and returns what each of them has sent.
fn exchange(job: &Job, bytes: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
    let mut sends = Vec::new();
    let others = || (0..job.size()).filter(|&rank| rank != job.rank());
    for rank in others() {
        let sent = job.endpoint().isend(job.peer(rank), TAG, bytes.to_vec());
        sends.push(sent.map_err(|failed| failed.error)?);
    }
    let mut all = vec![bytes.to_vec(); job.size()];
    for rank in others() {
        let part = &mut all[rank];
        let received = job.endpoint().recv(job.peer(rank), TAG, TAG_ALL, &mut part[..])?;
        ensure!(received.length == bytes.len() as u64, "member {rank} sent another length");
    }
    for send in sends {
        send.wait().map_err(|failed| failed.error)?;
    }
    Ok(all)
}
