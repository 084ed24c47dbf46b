//! Messages that wait in their sender's memory: how they meet a receive and how they end.

use memferry_sys::affinity;
use memferry_sys::shared_memory::Access;

use super::{Connection, Kept, Request, State, turn};
use crate::connection::{CopyError, View, Wire};
use crate::envelope::Envelope;
use crate::error::Error;
use crate::path::{self, Fetch, Looks, ReceiveStage, SendStage, Sides, Step, Together};
use crate::pieces::Piece;
use crate::plan::pinning::{self, Copier};
use crate::plan::{self, Closeness, Ends, Facts, PathKind, Pinning, Plan, Question, Way};
use crate::region;
use crate::ring::cells::Nonsense;
use crate::wire::{Manner, Note, Number, Place};

impl State {
    /// A message that waits at its sender has met a receive. If the sender expects a message too,
    /// this side may be about to send it: then how to get this one is planned later.
    pub(super) fn meet(
        &mut self,
        number: Number,
        (peer, arrival): (usize, u64),
        envelope: Envelope,
        length: u64,
        request: Request,
    ) -> Result<(), Nonsense> {
        let Some(receiving) = self.operations.receiving(number) else { return Ok(()) };
        receiving.meet(peer, envelope, length);
        receiving.arrival = arrival;
        let Request { sender, source, core, expects, absent } = request;
        receiving.stage = ReceiveStage::Met { sender, source, core, absent };
        if !expects {
            self.fetch(number)?;
        }
        let Some(receiving) = self.operations.receiving(number) else { return Ok(()) };
        if let ReceiveStage::Met { .. } | ReceiveStage::Fetching(_) = receiving.stage {
            let connection = self.connection(peer);
            connection.active.push(number);
            connection.is_stepping = true;
        }
        Ok(())
    }

    /// Plans how to get a message that waits at its sender, and begins.
    pub(super) fn fetch(&mut self, number: Number) -> Result<(), Nonsense> {
        let cores = match self.operations.receiving(number).map(|r| &r.stage) {
            Some(ReceiveStage::Met { .. }) => self.cores(),
            _ => return Ok(()),
        };
        let Self { operations, peers, facts, looks, .. } = self;
        let Some(receiving) = operations.receiving(number) else { return Ok(()) };
        let ReceiveStage::Met { sender, source, core, absent: never_comes } = &receiving.stage
        else {
            return Ok(());
        };
        let connection = peers[receiving.peer].connection.as_mut().expect("it is connected");
        let (view, way) = connection.wire.view(source, Access::Read);
        let (bytes, pieces) = (receiving.accepted(), receiving.pieces.as_slice());
        let absent = absent(looks, facts, bytes, pieces, &view);
        let question = connection.question(bytes, pieces, way, *core, cores, absent);
        let mut plan = plan::rendezvous(facts, &question);
        if bytes == 0 || (plan.path == PathKind::Cooperative && !connection.wire.has_record()) {
            plan.path = if way == Way::None { PathKind::Pipeline } else { PathKind::Single };
        }
        // Memory that may never come is read by a thread that nobody waits for.
        let is_reached = way == Way::Cross && plan.path != PathKind::Pipeline;
        let is_slow = *never_comes && is_reached && bytes > 0;
        if is_slow {
            plan.path = PathKind::Single;
        }
        let is_target_absent = plan.path == PathKind::Cooperative && looks.may_be_absent(pieces);
        tracing::trace!(bytes, path = plan.path.name(), "a message met a receive");
        let path = path::of(plan.path);
        receiving.stage = ReceiveStage::Fetching(Box::new(Fetch {
            sender: *sender,
            plan,
            sides: Sides::new(view, &receiving.pieces),
            done: 0,
            together: None,
            engines: None,
            copying: None,
            is_slow,
            is_target_absent,
        }));
        path.begin(receiving, &mut turn(number, &mut connection.wire))
    }

    /// The kernel refuses to copy a message out of its sender's memory. If the sender has ended, its end
    /// ends the receive; else all of the message comes through the shared space.
    #[cold]
    pub(super) fn fall_back(
        &mut self,
        peer: usize,
        number: Number,
        error: CopyError,
    ) -> Result<Step, Nonsense> {
        let Self { operations, peers, .. } = self;
        let connection = peers[peer].connection.as_mut().expect("it is connected");
        if !connection.wire.is_alive() {
            connection.is_ending = true;
            return Ok(Step::Idle);
        }
        connection.wire.note_refusal(error, Access::Read);
        let Some(receiving) = operations.receiving(number) else { return Ok(Step::Done) };
        if let ReceiveStage::Fetching(fetch) = &mut receiving.stage {
            tracing::debug!(?error, "a message comes through the shared space instead");
            fetch.plan.path = PathKind::Pipeline;
            (fetch.together, fetch.engines, fetch.is_slow) = (None, None, false);
        }
        let wire = &mut connection.wire;
        path::of(PathKind::Pipeline).begin(receiving, &mut turn(number, wire))?;
        wire.announce();
        // From now on it moves when fragments come.
        Ok(Step::Done)
    }

    /// How to get a small message that waits at its sender, if the planner would let the receiver copy it
    /// alone.
    pub(super) fn plan_now(
        &mut self,
        peer: usize,
        source: Place,
        length: u64,
        core: u16,
        pieces: &[Piece],
    ) -> Option<(View, Plan)> {
        let Place::Piece { .. } = source else { return None };
        let cores = self.cores();
        let Self { peers, facts, looks, .. } = self;
        let connection = peers[peer].connection.as_mut()?;
        let source = connection.wire.read_place(source, length).ok()?;
        let (view, way) = connection.wire.view(&source, Access::Read);
        let absent = absent(looks, facts, length, pieces, &view);
        let question = connection.question(length, pieces, way, core, cores, absent);
        let plan = plan::rendezvous(facts, &question);
        let is_now = plan.path == PathKind::Single && connection.wire.is_surely_alive();
        is_now.then_some((view, plan))
    }

    /// A receive has all its bytes: tells its sender, and then the receive is over. In this order:
    /// whoever ends after its last receive leaves no sender in the dark. Without room in the ring
    /// it is tried again later; returns whether it was done.
    pub(super) fn tell_arrived(
        &mut self,
        peer: usize,
        number: Number,
        sender: Number,
    ) -> Result<bool, Nonsense> {
        let connection = self.connection(peer);
        let (has_room, others) = (connection.wire.has_room()?, connection.arrived);
        let Some(receiving) = self.operations.receiving(number) else { return Ok(true) };
        let waited = matches!(receiving.stage, ReceiveStage::Arrived { .. });
        // Those that have waited go first.
        if !has_room || (others > 0 && !waited) {
            receiving.stage = ReceiveStage::Arrived { sender };
            self.connection(peer).arrived += usize::from(!waited);
            return Ok(false);
        }
        let connection = self.connection(peer);
        connection.arrived -= usize::from(waited);
        connection.wire.write(&Note::Finish { sender, error: 0 }.encode());
        self.complete_receive(number);
        Ok(true)
    }

    pub(super) fn accepted(
        &mut self,
        peer: usize,
        sender: Number,
        receiver: Number,
        length: u64,
        manner: &Manner,
    ) -> Result<(), Nonsense> {
        let stream_bytes = self.facts.stream_bytes;
        let Self { operations, peers, facts, looks, .. } = self;
        let connection = peers[peer].connection.as_mut().expect("notes come from connections");
        // The list of pieces is taken out of the ring whatever comes of it.
        let helping = path::begin_helping(&mut connection.wire, manner, length, stream_bytes)?;
        let Some(sending) = operations.sending(sender).filter(|s| s.peer == peer) else {
            return Err(Nonsense("an answer to no request"));
        };
        let is_first = matches!(sending.stage, SendStage::Announced | SendStage::Withdrawing);
        // A receiver that cannot copy after all has the message sent.
        let is_fallback =
            matches!(sending.stage, SendStage::Helping(_)) && matches!(manner, Manner::Pipeline);
        if !is_first && !is_fallback {
            return Err(Nonsense("a second answer to a request"));
        }
        if length > sending.length {
            return Err(Nonsense("a request for more than was offered"));
        }
        match manner {
            Manner::Pipeline => {
                sending.path = PathKind::Pipeline;
                let receiver = Some(receiver);
                sending.stage = SendStage::Streaming { sent: 0, receiver, until: length };
            }
            Manner::Together { .. } => {
                let Some((mut together, target)) = helping else { return Ok(()) };
                together.help_from(&sending.pieces, target);
                together.populate(helped(looks, facts, sending.pieces.as_slice(), &together));
                sending.path = PathKind::Cooperative;
                sending.stage = SendStage::Helping(together);
            }
        }
        // One that a thread of its own helped with is not among those with steps to do.
        if is_first || !connection.active.contains(&sender) {
            connection.active.push(sender);
        }
        connection.is_stepping = true;
        Ok(())
    }

    pub(super) fn finished(
        &mut self,
        peer: usize,
        sender: Number,
        error: u16,
    ) -> Result<(), Nonsense> {
        let Some(sending) = self.operations.sending(sender).filter(|s| s.peer == peer) else {
            return Err(Nonsense("the end of no message"));
        };
        if matches!(sending.stage, SendStage::Queued) {
            return Err(Nonsense("the end of a message that did not begin"));
        }
        if matches!(sending.stage, SendStage::Held(_)) {
            return Err(Nonsense("a second end of a message"));
        }
        let (tag, length) = (sending.envelope.tag, sending.length);
        let outcome = match path::reported(error) {
            None => Ok(self.received(peer, tag, length)),
            Some(error) => Err(error),
        };
        self.finish_send(sender, outcome);
        let connection = self.connection(peer);
        connection.announced = connection.announced.saturating_sub(1);
        Ok(())
    }

    pub(super) fn withdraw(&mut self, peer: usize, wanted: Number) {
        let (mut removed, mut weight, mut bytes) = (0, 0, 0);
        self.matching.retain(|unexpected| {
            // What somebody has set aside is as good as received.
            let is_it = unexpected.source == peer
                && unexpected.claim.is_none()
                && matches!(&unexpected.message, Kept::There { request, .. } if request.sender == wanted);
            removed += usize::from(is_it);
            weight += if is_it { unexpected.message.weight() } else { 0 };
            bytes += if is_it { unexpected.message.bytes() } else { 0 };
            !is_it
        });
        self.let_go_of_kept(peer, weight, bytes);
        let granted = removed > 0;
        self.wire(peer).post(Note::Withdrawn { sender: wanted, granted });
    }

    pub(super) fn withdrawn(&mut self, peer: usize, sender: Number, granted: bool) {
        let sending = self.operations.sending(sender).filter(|s| s.peer == peer);
        let Some(sending) = sending else { return };
        if !matches!(sending.stage, SendStage::Withdrawing) {
            return;
        }
        if granted {
            let connection = self.peers[peer].connection.as_mut().expect("notes come from one");
            connection.announced = connection.announced.saturating_sub(1);
            self.operations.finish(sender, Err(Error::Cancelled));
        } else {
            sending.stage = SendStage::Announced;
        }
    }

    /// How many cores no process of this conversation needs.
    pub(super) fn spare_cores(&self) -> usize {
        self.cores().spare
    }

    fn cores(&self) -> Cores {
        let online = super::settings::online_cores().saturating_sub(self.processes());
        // Channels of the copy core run where this process may run.
        let spare = online.min(self.allowed_cores.saturating_sub(1));
        Cores { spare, are_shared: self.is_crowded }
    }
}

/// The cores for a conversation.
#[derive(Debug, Clone, Copy)]
struct Cores {
    /// How many no process of it needs.
    spare: usize,
    /// Whether it has more processes than cores.
    are_shared: bool,
}

impl Connection {
    /// What the planner has to know of a message.
    fn question(
        &self,
        bytes: u64,
        target: &[Piece],
        receiver_reads: Way,
        sender_core: u16,
        cores: Cores,
        absent: Ends,
    ) -> Question {
        Question {
            bytes,
            receiver_reads,
            sender_writes: sender_writes(&self.wire, target),
            closeness: Closeness::of(sender_core.into(), affinity::current_core()),
            spare_cores: cores.spare,
            // Where processes share cores, it is most likely not running.
            sender_is_busy: cores.are_shared || self.announced > 0 || !self.outbox.is_empty(),
            absent,
        }
    }
}

/// How the sender will get at the target: regions are shared when it is described to it.
fn sender_writes(wire: &Wire, target: &[Piece]) -> Way {
    let shareable = |piece: &Piece| region::find(piece.address, piece.length).is_some();
    if target.iter().all(shareable) { Way::Near } else { wire.their_way(target, Access::Write) }
}

/// Which memory of a message the receiver may have to bring in. Sources matter to engines alone.
fn absent(looks: &mut Looks, facts: &Facts, bytes: u64, target: &[Piece], source: &View) -> Ends {
    if !pinning::looks(facts, bytes) {
        return Ends::default();
    }
    Ends {
        source: bytes >= plan::offload_limit(facts) && looks.is_view_absent(source, bytes),
        target: looks.is_absent(target, bytes),
    }
}

/// What a sender brings in of what it copies for its receiver.
fn helped(looks: &mut Looks, facts: &Facts, source: &[Piece], together: &Together) -> Ends {
    let (bytes, Some(target)) = (together.length(), together.target()) else {
        return Ends::default();
    };
    let way = if matches!(target, View::Near { .. }) { Way::Near } else { Way::Cross };
    let can = pinning::reachable(PathKind::Cooperative, Copier::Sender, way);
    match facts.limits.pinning {
        Pinning::On => can,
        _ if !pinning::looks(facts, bytes) => Ends::default(),
        _ => Ends {
            source: can.source && looks.is_absent(source, bytes),
            target: can.target && looks.is_view_absent(target, bytes),
        },
    }
}
