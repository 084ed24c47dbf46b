//! Requests between the providers of two processes. They travel as messages that match no receive
//! ([`MatchSpace::Service`]): atomic operations that the owner of the memory executes, notifications
//! of writes with completion data, and the return of credit for these.
//!
//! A target queues an entry for every notification, so an initiator has a limited credit of them,
//! which the target returns while the program reads its queue.

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use memferry_message::{Envelope, MatchSpace, Peer, ServiceMessage};

use super::core::EndpointCore;
use crate::abi::*;
use crate::guard::{FiError, Result};
use crate::mr_table::MrTable;
use crate::queue::QueuedCompletion;

/// The kinds of requests, in the lowest byte of the tag.
pub(super) const ATOMIC: u8 = 1;
const WRITTEN: u8 = 2;
const CREDIT: u8 = 3;

/// The maximum number of notifications to one peer for which it has not returned the credit.
const MAX_NOTIFICATIONS: usize = 256;
/// The number of notifications for which credit is returned at once.
const CREDIT_BATCH: usize = 64;
/// No credit is returned while a program leaves this number of entries in its queue.
const MAX_UNREAD_ENTRIES: usize = 4096;
/// The maximum number of peers on other hosts whose handles are kept.
const MAX_PINNED: usize = 4096;
/// From this number of peers on, disconnected ones are removed.
const PEER_SWEEP_THRESHOLD: usize = 64;

/// The notification of a peer after a write.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteNotification {
    pub(super) peer: Peer,
    pub(super) data: u64,
    /// The number of bytes written.
    pub(super) length: u64,
}

/// The state of requests of one endpoint.
#[derive(Debug)]
pub(super) struct ServiceState {
    /// The memory that peers may access.
    pub(super) mr_table: Arc<MrTable>,
    /// The number of atomic operations without a reply.
    pub(super) atomics_in_flight: AtomicUsize,
    /// The last ticket of an atomic operation.
    pub(super) tickets: AtomicU64,
    notifications: Mutex<HashMap<Peer, NotificationCredit>>,
    /// Credit is due for notifications of peers.
    owes_credit: AtomicBool,
    /// The peers on other hosts that have sent requests.
    pinned: Mutex<HashSet<Peer>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct NotificationCredit {
    /// Notifications to the peer without credit.
    sent: usize,
    /// Notifications of the peer for which no credit was returned.
    received: usize,
}

impl ServiceState {
    pub(super) fn new(mr_table: Arc<MrTable>) -> Self {
        Self {
            mr_table,
            atomics_in_flight: AtomicUsize::new(0),
            tickets: AtomicU64::new(0),
            notifications: Mutex::default(),
            owes_credit: AtomicBool::new(false),
            pinned: Mutex::default(),
        }
    }
}

/// The envelope of a request.
pub(super) fn request(kind: u8, detail: u64, data: Option<u64>) -> Envelope {
    Envelope { space: MatchSpace::Service, tag: u64::from(kind) | detail << 8, data }
}

impl EndpointCore {
    /// Executes the requests of peers that have arrived.
    #[cold]
    pub(super) fn serve(&self) {
        while let Some(message) = self.messages.take_service() {
            self.pin_remote(message.peer);
            let detail = message.envelope.tag >> 8;
            match message.envelope.tag as u8 {
                ATOMIC => self.serve_atomic(&message),
                WRITTEN => self.on_written(&message),
                CREDIT => self.on_credit(message.peer, detail),
                kind => tracing::debug!(kind, "dropping a request of an unknown kind"),
            }
            self.messages.end_service(message.peer);
        }
        self.return_owed_credits();
    }

    /// Keeps the handle of a peer on another host, as if the program had inserted its address:
    /// replies and credit are sent to it later.
    fn pin_remote(&self, peer: Peer) {
        if !self.has_remotes() {
            return;
        }
        let mut pinned = self.service.pinned.lock().unwrap();
        if pinned.len() < MAX_PINNED
            && !pinned.contains(&peer)
            && let Some(number) = self.messages.remote_id(peer)
            && self.messages.remote_peer(number) == Ok(peer)
        {
            pinned.insert(peer);
        }
    }

    /// Takes credit for a notification. Fails with `FI_EAGAIN` if none is left.
    pub(super) fn take_notification_credit(&self, peer: Peer) -> Result {
        let mut all = self.service.notifications.lock().unwrap();
        self.sweep(&mut all, peer);
        let credit = all.entry(peer).or_default();
        if credit.sent < MAX_NOTIFICATIONS {
            credit.sent += 1;
            return Ok(());
        }
        drop(all);
        self.messages.progress();
        Err(FiError(FI_EAGAIN))
    }

    /// Removes disconnected peers at intervals, when a new one is about to be added.
    fn sweep(&self, all: &mut HashMap<Peer, NotificationCredit>, next: Peer) {
        if all.len() >= PEER_SWEEP_THRESHOLD
            && all.len().is_power_of_two()
            && !all.contains_key(&next)
        {
            all.retain(|peer, _| self.identifier_of(*peer).is_some());
        }
    }

    pub(super) fn give_back_notification_credit(&self, peer: Peer, count: usize) {
        if let Some(credit) = self.service.notifications.lock().unwrap().get_mut(&peer) {
            credit.sent = credit.sent.saturating_sub(count);
        }
    }

    /// Notifies the target of a write that has completed with this code, if it was successful.
    /// Returns the code of the whole operation.
    pub(super) fn finish_notified(&self, notification: &WriteNotification, code: c_int) -> c_int {
        let WriteNotification { peer, data, length } = *notification;
        let sent = match code {
            0 => self.messages.inject(peer, request(WRITTEN, 0, Some(data)), &length.to_le_bytes()),
            _ => {
                self.give_back_notification_credit(peer, 1);
                return code;
            }
        };
        sent.map_or_else(|error| FiError::from(error).0, |()| 0)
    }

    /// Queues the entry for a write of a peer.
    fn on_written(&self, message: &ServiceMessage) {
        let length = message.bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let (Some(data), Some(length)) = (message.envelope.data, length) else {
            return tracing::debug!("dropping an invalid notification");
        };
        {
            let mut all = self.service.notifications.lock().unwrap();
            self.sweep(&mut all, message.peer);
            let credit = all.entry(message.peer).or_default();
            if credit.received >= MAX_NOTIFICATIONS {
                return tracing::warn!("dropping a notification beyond the credit of its sender");
            }
            credit.received += 1;
            if credit.received >= CREDIT_BATCH {
                self.service.owes_credit.store(true, Ordering::Relaxed);
            }
        }
        let flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
        self.receives.deliver(QueuedCompletion {
            data,
            length: usize::try_from(length).unwrap_or(usize::MAX),
            source: self.number_of(message.peer).unwrap_or(FI_ADDR_NOTAVAIL),
            ..QueuedCompletion::new(0, flags)
        });
    }

    fn on_credit(&self, peer: Peer, count: u64) {
        self.give_back_notification_credit(peer, usize::try_from(count).unwrap_or(usize::MAX));
    }

    /// Returns the credit that is due, unless the program leaves its queue full.
    #[inline]
    pub(crate) fn return_owed_credits(&self) {
        if self.service.owes_credit.load(Ordering::Relaxed) {
            self.return_credits();
        }
    }

    #[cold]
    fn return_credits(&self) {
        let unread = self.receives.queue.as_ref().map_or(0, |queue| queue.len());
        if unread >= MAX_UNREAD_ENTRIES {
            return;
        }
        let mut due = Vec::new();
        {
            let mut all = self.service.notifications.lock().unwrap();
            self.service.owes_credit.store(false, Ordering::Relaxed);
            let is_due = |credit: &NotificationCredit| credit.received >= CREDIT_BATCH;
            for (peer, credit) in all.iter_mut().filter(|(_, credit)| is_due(credit)) {
                due.push((*peer, std::mem::take(&mut credit.received)));
            }
        }
        for (peer, count) in due {
            // A peer that is gone needs no credit.
            let _ = self.messages.inject(peer, request(CREDIT, count as u64, None), &[]);
        }
    }
}
