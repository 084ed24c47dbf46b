use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// The number of measurements.
static MEASURED: AtomicU32 = AtomicU32::new(0);

#[derive(Debug, PartialEq)]
struct Height {
    origin: ProfileOrigin,
    metres: f64,
}

impl StoredProfile for Height {
    const MAGIC: &'static str = "height";

    fn path(named: &Path, _: bool) -> PathBuf {
        named.with_extension("height")
    }

    fn cores() -> usize {
        3
    }

    fn built_in() -> Self {
        Self { origin: ProfileOrigin::BuiltIn, metres: 1.0 }
    }

    fn measure() -> Result<Self, MeasureError> {
        MEASURED.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
        Ok(Self { origin: ProfileOrigin::Measured, metres: 2.5 })
    }

    fn with_origin(self, origin: ProfileOrigin) -> Self {
        Self { origin, ..self }
    }

    fn to_fields(&self) -> String {
        format!("metres {}\n", self.metres)
    }

    fn from_fields(entries: &ProfileFields<'_>) -> Result<Self, String> {
        Ok(Self { origin: ProfileOrigin::BuiltIn, metres: entries.number("metres")? })
    }
}

#[test]
fn values_are_read_back_as_they_were() {
    let height = Height { origin: ProfileOrigin::BuiltIn, metres: 8.25 };
    assert_eq!(from_text(&to_text(&height)), Ok(Some(height)));
}

#[test]
fn a_file_of_another_machine_counts_for_nothing_and_other_text_is_an_error() {
    assert_eq!(from_text::<Height>("height 0.0.0 99 some other processor\n"), Ok(None));
    assert!(from_text::<Height>("heights 1 2 3\n").is_err());
    let good = to_text(&Height::built_in());
    for value in ["-3", "soon", "inf", "NaN"] {
        let broken = good.replace("metres 1", &format!("metres {value}"));
        assert!(from_text::<Height>(&broken).is_err(), "{value}");
    }
}

#[test]
fn a_folder_that_the_user_named_is_not_created_and_nothing_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let source = ProfileSource::File(missing.join("named"));
    // Each process measures for itself.
    for grams in [5.0, 6.0] {
        next_weights(&[Ok(grams)]);
        let measured = Weight { origin: ProfileOrigin::Measured, grams };
        assert_eq!(load::<Weight>(&source).unwrap(), measured);
        assert!(!missing.exists());
    }
    let weight = Weight::built_in();
    assert!(save(&weight, &missing.join("named")).is_err() && !missing.exists());
}

#[test]
fn the_folder_of_the_cache_is_created() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache").join("memferry").join("profile");
    create_parent(&file).unwrap();
    assert!(file.parent().unwrap().is_dir() && has_parent(&file));
    assert!(has_parent(Path::new("profile")));
}

#[test]
fn of_many_that_start_together_one_measures_for_all() {
    let folder = tempfile::tempdir().unwrap();
    let source = ProfileSource::File(folder.path().join("named"));
    let heights: Vec<Height> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| load(&source).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(MEASURED.load(Ordering::Relaxed), 1);
    assert!(heights.iter().all(|height| height.metres == 2.5));
    let file = folder.path().join("named.height");
    assert_eq!(heights.iter().filter(|height| height.origin == ProfileOrigin::Measured).count(), 1);
    assert_eq!(load::<Height>(&source).unwrap().origin, ProfileOrigin::Saved(file.clone()));
    let left: Vec<_> = fs::read_dir(file.parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "only the file is left");
}

/// A profile whose measurements are set in advance, on each thread separately.
#[derive(Debug, Clone, PartialEq)]
struct Weight {
    origin: ProfileOrigin,
    grams: f64,
}

thread_local! {
    static SCALES: std::cell::RefCell<Vec<Result<f64, MeasureError>>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Sets the results of the next measurements of this thread, the last one first.
fn next_weights(weights: &[Result<f64, MeasureError>]) {
    SCALES.set(weights.to_vec());
}

fn busy() -> MeasureError {
    check_contention(0.42).unwrap_err()
}

impl StoredProfile for Weight {
    const MAGIC: &'static str = "weight";

    fn path(named: &Path, _: bool) -> PathBuf {
        named.to_owned()
    }

    fn cores() -> usize {
        3
    }

    fn built_in() -> Self {
        Self { origin: ProfileOrigin::BuiltIn, grams: 1.0 }
    }

    fn measure() -> Result<Self, MeasureError> {
        let next =
            SCALES.with_borrow_mut(|scales| scales.pop().expect("no measurement is expected"));
        next.map(|grams| Self { origin: ProfileOrigin::Measured, grams })
    }

    fn implausible(&self) -> Option<String> {
        (self.grams > 1000.0).then(|| "implausible weight".into())
    }

    fn with_origin(self, origin: ProfileOrigin) -> Self {
        Self { origin, ..self }
    }

    fn to_fields(&self) -> String {
        format!("grams {}\n", self.grams)
    }

    fn from_fields(entries: &ProfileFields<'_>) -> Result<Self, String> {
        Ok(Self { origin: ProfileOrigin::BuiltIn, grams: entries.number("grams")? })
    }
}

fn load_weight(path: &Path) -> Weight {
    load(&ProfileSource::File(path.to_owned())).unwrap()
}

#[test]
fn others_that_have_the_processors_for_a_tenth_of_the_time_make_a_busy_machine() {
    assert_eq!(check_contention(0.0), Ok(()));
    assert_eq!(check_contention(0.1), Ok(()));
    let MeasureError::Unreliable(why) = busy() else { panic!("a busy machine is unreliable") };
    assert!(why.contains("42 %"), "{why}");
}

#[test]
fn a_quota_that_throttles_is_another_reason_than_a_busy_machine() {
    assert_eq!(check_throttling(0.1), Ok(()));
    let Err(MeasureError::Unreliable(why)) = check_throttling(0.6) else {
        panic!("60 % is unreliable")
    };
    assert!(
        why.contains("CPU quota") && why.contains("60 %") && !why.contains("other processes"),
        "{why}"
    );
}

#[test]
fn what_was_measured_on_a_busy_machine_is_not_kept_and_not_tried_again_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weight");
    next_weights(&[Err(busy())]);
    let weight = load_weight(&path);
    let ProfileOrigin::Rejected(why) = &weight.origin else { panic!("{weight:?}") };
    assert!(why.contains("busy") && weight.grams == 1.0, "{weight:?}");
    // The next process does not measure: it would have no results.
    assert_eq!(load_weight(&path), weight);
}

#[test]
fn a_measurement_is_tried_again_a_minute_after_one_that_was_not_kept() {
    let now = SystemTime::now();
    let text = rejected_text::<Weight>("busy", now);
    assert_eq!(recently_rejected::<Weight>(&text, now), Some("busy".into()));
    assert_eq!(recently_rejected::<Weight>(&text, now + RETRY_AFTER), None);
    assert_eq!(
        recently_rejected::<Weight>(&text, now - RETRY_AFTER),
        None,
        "the clock was set back"
    );
    assert_eq!(from_text::<Weight>(&text), Ok(None));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weight");
    fs::write(&path, rejected_text::<Weight>("busy", now - RETRY_AFTER)).unwrap();
    next_weights(&[Ok(5.0)]);
    assert_eq!(load_weight(&path), Weight { origin: ProfileOrigin::Measured, grams: 5.0 });
    assert_eq!(load_weight(&path), Weight { origin: ProfileOrigin::Saved(path), grams: 5.0 });
}

#[test]
fn values_that_no_machine_has_are_neither_saved_nor_believed_when_they_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weight");
    let heavy = Weight { origin: ProfileOrigin::Measured, grams: 1e6 };
    save(&heavy, &path).unwrap();
    next_weights(&[Ok(1e6)]);
    let weight = load_weight(&path);
    assert_eq!(weight.origin, ProfileOrigin::Rejected("implausible weight".into()));
    assert_eq!(weight.grams, 1.0);
    save(&heavy, &path).unwrap();
    next_weights(&[Ok(7.0)]);
    assert_eq!(load_weight(&path), Weight { origin: ProfileOrigin::Measured, grams: 7.0 });
}

#[test]
fn a_process_on_fewer_cores_reads_what_was_saved_for_all_and_measures_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("height");
    assert_eq!(saved_for::<Height>(&path, 8), None);
    fs::write(&path, machine_line_for::<Height>(8) + "metres 4\n").unwrap();
    let found = saved_for::<Height>(&path, 8).map(|height| height.metres);
    assert_eq!(found, Some(4.0));
    assert_eq!(saved_for::<Height>(&path, 16), None, "of another machine");
    assert_eq!(from_text::<Height>(&fs::read_to_string(&path).unwrap()), Ok(None));
    fs::write(&path, "no profile").unwrap();
    assert_eq!(saved_for::<Height>(&path, 8), None);
}
