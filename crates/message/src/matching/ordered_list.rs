//! A list in order of insertion, from which any entry is removed in constant time.

/// No slot.
pub(super) const NONE: u32 = u32::MAX;
/// Number of slots that an empty list keeps allocated.
const KEPT_SLOTS: usize = 1024;

struct Slot<T> {
    /// `None` if the slot is free.
    entry: Option<T>,
    /// The position in the order of all entries there ever were.
    sequence: u64,
    previous: u32,
    /// The next entry, or the next free slot.
    next: u32,
}

/// Entries in order, in slots that are reused.
pub(super) struct OrderedList<T> {
    slots: Vec<Slot<T>>,
    first: u32,
    last: u32,
    free: u32,
    length: usize,
    next_sequence: u64,
}

impl<T> Default for OrderedList<T> {
    fn default() -> Self {
        let (slots, first, last, free) = (Vec::new(), NONE, NONE, NONE);
        Self { slots, first, last, free, length: 0, next_sequence: 0 }
    }
}

impl<T> OrderedList<T> {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.length
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Appends an entry, and returns its slot.
    #[inline]
    pub(super) fn push(&mut self, entry: T) -> u32 {
        let new = Slot {
            entry: Some(entry),
            sequence: self.next_sequence,
            previous: self.last,
            next: NONE,
        };
        self.next_sequence += 1;
        let slot = self.free;
        let slot = if slot == NONE {
            let slot = u32::try_from(self.slots.len()).ok().filter(|&slot| slot != NONE);
            self.slots.push(new);
            slot.expect("the limits of operations and of unexpected messages are lower")
        } else {
            self.free = self.slots[slot as usize].next;
            self.slots[slot as usize] = new;
            slot
        };
        match self.last {
            NONE => self.first = slot,
            last => self.slots[last as usize].next = slot,
        }
        self.last = slot;
        self.length += 1;
        slot
    }

    /// Removes the entry of a slot.
    ///
    /// # Panics
    /// If the slot is free.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) -> T {
        let freed = &mut self.slots[slot as usize];
        let entry = freed.entry.take().expect("the slot has an entry");
        let (previous, next) = (freed.previous, freed.next);
        freed.next = self.free;
        self.free = slot;
        match previous {
            NONE => self.first = next,
            previous => self.slots[previous as usize].next = next,
        }
        match next {
            NONE => self.last = previous,
            next => self.slots[next as usize].previous = previous,
        }
        self.length -= 1;
        if self.length == 0 && self.slots.len() > KEPT_SLOTS {
            *self = Self { next_sequence: self.next_sequence, ..Self::default() };
        }
        entry
    }

    /// The entry of a slot, if it has one.
    #[inline]
    pub(super) fn get(&self, slot: u32) -> Option<&T> {
        self.slots.get(slot as usize)?.entry.as_ref()
    }

    /// As [`OrderedList::get`], to change it.
    #[inline]
    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.slots.get_mut(slot as usize)?.entry.as_mut()
    }

    /// The position of an entry in the order: earlier entries have lower ones.
    #[inline]
    pub(super) fn sequence(&self, slot: u32) -> u64 {
        self.slots[slot as usize].sequence
    }

    /// The slots and their entries, in order, from either end.
    #[inline]
    pub(super) fn iter(&self) -> Iter<'_, T> {
        Iter { list: self, front: self.first, back: self.last, left: self.length }
    }
}

/// The iterator of [`OrderedList::iter`].
pub(super) struct Iter<'a, T> {
    list: &'a OrderedList<T>,
    front: u32,
    back: u32,
    left: usize,
}

impl<'a, T> Iter<'a, T> {
    #[inline]
    fn visit(&mut self, slot: u32) -> Option<(u32, &'a Slot<T>)> {
        self.left = self.left.checked_sub(1)?;
        Some((slot, &self.list.slots[slot as usize]))
    }
}

impl<'a, T> Iterator for Iter<'a, T> {
    type Item = (u32, &'a T);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let (slot, visited) = self.visit(self.front)?;
        self.front = visited.next;
        Some((slot, visited.entry.as_ref()?))
    }
}

impl<T> DoubleEndedIterator for Iter<'_, T> {
    #[inline]
    fn next_back(&mut self) -> Option<Self::Item> {
        let (slot, visited) = self.visit(self.back)?;
        self.back = visited.previous;
        Some((slot, visited.entry.as_ref()?))
    }
}
